"""The long-running process: reads events, keeps the model, publishes vectors."""
