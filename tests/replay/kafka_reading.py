"""Reads a topic back, for tests of what was sent."""

from typing import Any

from kafka import KafkaConsumer
from kafka.structs import TopicPartition


def read_all(bootstrap_servers: str, topic: str) -> list[Any]:
    """Every record of every partition, in order within a partition."""
    with KafkaConsumer(bootstrap_servers=bootstrap_servers, group_id=None, enable_auto_commit=False) as consumer:
        partitions = [TopicPartition(topic, number) for number in sorted(consumer.partitions_for_topic(topic))]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        found: list[Any] = []
        while any(consumer.position(partition) < end for partition, end in ends.items()):
            for records in consumer.poll(timeout_ms=500).values():
                found += records
        return found
