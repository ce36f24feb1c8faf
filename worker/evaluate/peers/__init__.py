"""Other recommenders on the same events, one file each, imported when they are asked for."""
