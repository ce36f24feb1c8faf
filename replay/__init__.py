"""Traffic: streams data sets into Kafka as events."""
