"""Reading Kafka: where it starts, what is lost and found, and what the weather does to it."""

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import RetriableError, TopicAlreadyExistsError

from replay.local_stack import Broker, create_topic, free_port
from tests.kafka_log import spoil
from tests.waiting import eventually
from worker.kafka_source import KafkaSource
from worker.settings import KafkaSettings
from worker.source import Gap, Partition, SourceError

pytestmark = pytest.mark.integration

Make = Callable[..., KafkaSource]
_names = itertools.count()


class Kafka:
    """One broker as a test uses it: topics, records, and sources on them."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._sources: list[KafkaSource] = []

    @property
    def servers(self) -> str:
        return self.broker.bootstrap_servers

    def topic(self, partitions: int = 1) -> str:
        name = new_name()
        create_topic(self.servers, name, partitions)
        return name

    def source(self, *topics: str, **settings: Any) -> KafkaSource:
        settings = {"bootstrap_servers": self.servers, "metadata_max_age_ms": 200} | settings
        self._sources.append(KafkaSource(KafkaSettings(topics=topics, **settings), reopen_after_s=1.0))
        return self._sources[-1]

    def send(self, topic: str, values: Sequence[bytes], partition: int = 0, **options: Any) -> None:
        """Write `values` and wait until all are acknowledged."""
        times = options.pop("timestamps_ms", [None] * len(values))
        with KafkaProducer(bootstrap_servers=self.servers, acks="all", **options) as producer:
            sent = [
                producer.send(topic, value, partition=partition, timestamp_ms=time)
                for value, time in zip(values, times, strict=True)
            ]
            for future in sent:
                future.get(30)

    def admin(self) -> KafkaAdminClient:
        return KafkaAdminClient(bootstrap_servers=self.servers)

    def delete_before(self, topic: str, offset: int) -> None:
        with self.admin() as admin:
            admin.delete_records({TopicPartition(topic, 0): offset})

    def committed(self, group: str) -> dict[Partition, int]:
        with self.admin() as admin:
            try:
                found = admin.list_group_offsets(group)[group]
            except RetriableError:  # a new group, or a broker that has just started
                return {}
        return {Partition(*at): committed.offset for at, committed in found.items()}

    def close(self) -> None:
        for source in self._sources:
            source.close()


@pytest.fixture
def kafka(broker: Broker) -> Iterator[Kafka]:
    """The session's broker."""
    kafka = Kafka(broker)
    yield kafka
    kafka.close()


@pytest.fixture
def own_kafka(breakable_broker: Broker) -> Iterator[Kafka]:
    """The broker that this test may break."""
    kafka = Kafka(breakable_broker)
    yield kafka
    if breakable_broker.running:
        breakable_broker.resume()
    kafka.close()


def new_name() -> str:
    return f"t{next(_names)}-{uuid.uuid4().hex[:8]}"


def numbered(start: int, stop: int) -> list[bytes]:
    return [b"%d" % n for n in range(start, stop)]


def values_of(source: KafkaSource, timeout_s: float = 0.05) -> list[bytes | None]:
    """What one poll brings."""
    records = source.poll(timeout_s)
    return list(records.values) if records else []


def read(source: KafkaSource, count: int) -> list[bytes | None]:
    """The next records, until there are `count`; fails if they do not come."""
    values: list[bytes | None] = []
    eventually(lambda: values.extend(values_of(source)) or len(values) >= count, 60, lambda: f"{count}: {values}")
    assert len(values) == count
    return values


def read_to_the_end(source: KafkaSource) -> list[bytes | None]:
    values: list[bytes | None] = []

    def at_the_end() -> bool:
        new = values_of(source)
        values.extend(new)
        return not new and source.caught_up

    eventually(at_the_end, 60, lambda: f"the end; so far {len(values)}")
    return values


def poll_until(source: KafkaSource, condition: Callable[[], object]) -> None:
    """Poll, bringing nothing, until `condition`."""

    def met() -> bool:
        assert values_of(source) == []
        return bool(condition())

    eventually(met, 60)


# Where a first start begins.


def test_a_first_start_reads_from_the_earliest_record(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 20))
    assert read_to_the_end(kafka.source(topic)) == numbered(0, 20)


def test_a_first_start_may_read_only_what_comes_from_now_on(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    kafka.send(topic, numbered(0, 20))
    source = kafka.source(topic, start="latest")
    poll_until(source, source.positions)
    assert source.positions() == {Partition(topic, 0): 20, Partition(topic, 1): 0}
    kafka.send(topic, numbered(20, 30))
    assert read(source, 10) == numbered(20, 30)


def test_a_first_start_may_begin_at_a_time(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    began = datetime.now(UTC) - timedelta(minutes=1)  # within the retention
    times = [began + timedelta(seconds=n) for n in range(20)]
    kafka.send(topic, numbered(0, 20), timestamps_ms=[int(time.timestamp() * 1000) for time in times])
    source = kafka.source(topic, start=(began + timedelta(seconds=4.5)).isoformat())
    assert read_to_the_end(source) == numbered(5, 20)
    assert source.positions()[Partition(topic, 1)] == 0


def test_a_time_that_has_not_come_yet_leaves_out_everything_so_far(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 20))
    source = kafka.source(topic, start="2100-01-01")
    poll_until(source, source.positions)
    assert source.positions() == {Partition(topic, 0): 20}


def test_committed_offsets_do_not_matter(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 10))
    consumer = KafkaConsumer(topic, bootstrap_servers=kafka.servers, group_id=topic, auto_offset_reset="earliest")
    eventually(lambda: consumer.poll(100), what="records")
    consumer.commit()
    consumer.close()
    assert kafka.committed(topic) == {Partition(topic, 0): 10}
    assert read_to_the_end(kafka.source(topic, group_id=topic)) == numbered(0, 10)


# Partitions and topics that appear.


def test_several_topics_are_read(kafka: Kafka) -> None:
    topics = [kafka.topic(), kafka.topic(2)]
    for n, topic in enumerate(topics):
        kafka.send(topic, numbered(10 * n, 10 * n + 10), partition=n)
    assert sorted(read_to_the_end(kafka.source(*topics))) == sorted(numbered(0, 20))  # type: ignore[type-var]


def test_a_partition_that_is_added_while_reading_is_read_from_its_beginning(kafka: Kafka) -> None:
    topic = kafka.topic()
    source = kafka.source(topic, start="latest")
    poll_until(source, source.positions)
    with kafka.admin() as admin:
        admin.create_partitions({topic: 2})
    eventually(lambda: kafka.send(topic, numbered(0, 10), partition=1) or True, what="the new partition")
    assert read(source, 10) == numbered(0, 10)
    assert source.positions() == {Partition(topic, 0): 0, Partition(topic, 1): 10}


def test_a_partition_that_was_added_while_nobody_read_is_read_from_its_beginning(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    kafka.send(topic, numbered(0, 10), partition=0)
    kafka.send(topic, numbered(10, 20), partition=1)
    source = kafka.source(topic, start="latest")
    source.seek({Partition(topic, 0): 10})
    assert read_to_the_end(source) == numbered(10, 20)


def test_a_topic_that_is_new_in_the_settings_starts_where_they_say(kafka: Kafka) -> None:
    old, new = kafka.topic(), kafka.topic()
    kafka.send(old, numbered(0, 10))
    kafka.send(new, numbered(10, 20))
    source = kafka.source(old, new, start="latest")
    source.seek({Partition(old, 0): 5})
    assert read_to_the_end(source) == numbered(5, 10)
    assert source.positions() == {Partition(old, 0): 10, Partition(new, 0): 10}


def test_positions_of_a_topic_that_is_no_longer_in_the_settings_are_kept(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 10))
    source = kafka.source(topic)
    source.seek({Partition("former", 3): 7, Partition(topic, 0): 5})
    assert read_to_the_end(source) == numbered(5, 10)
    assert source.positions() == {Partition("former", 3): 7, Partition(topic, 0): 10}


@pytest.mark.apache_kafka
def test_a_topic_that_is_not_there_yet_is_waited_for_and_read_from_its_beginning(kafka: Kafka) -> None:
    topic = new_name()
    source = kafka.source(topic, start="latest")
    for _ in range(10):
        assert values_of(source) == []
    assert not source.connected
    create_topic(kafka.servers, topic)
    kafka.send(topic, numbered(0, 10))
    assert read(source, 10) == numbered(0, 10)
    assert source.connected


@pytest.mark.apache_kafka
def test_a_topic_is_never_made_by_asking_for_it(own_kafka: Kafka) -> None:
    topic = new_name()
    source = own_kafka.source(topic)
    source.commit({Partition(topic, 0): 1})
    for _ in range(20):
        assert values_of(source) == []
    with own_kafka.admin() as admin:
        assert topic not in admin.list_topics()


# Gaps.


def test_what_retention_has_taken_before_a_start_is_told(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 100))
    kafka.delete_before(topic, 70)
    source = kafka.source(topic)
    source.seek({Partition(topic, 0): 30})
    assert read_to_the_end(source) == numbered(70, 100)
    [gap] = source.take_gaps()
    assert gap == Gap(Partition(topic, 0), expected=30, found=70)
    assert gap.lost == 40
    assert source.take_gaps() == []


def test_what_retention_takes_while_nobody_polls_is_told(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 10))
    source = kafka.source(topic, max_poll_records=10)
    assert read(source, 10) == numbered(0, 10)
    kafka.send(topic, numbered(10, 30))
    kafka.delete_before(topic, 25)
    kept = read_to_the_end(source)
    lost = sum(gap.lost for gap in source.take_gaps())
    # What had been fetched before the deletion is not lost.
    assert kept == numbered(30 - len(kept), 30)
    assert len(kept) + lost == 20


def test_a_gap_stops_a_source_that_must_not_lose_anything(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 100))
    kafka.delete_before(topic, 70)
    source = kafka.source(topic, on_gap="stop")
    source.seek({Partition(topic, 0): 30})
    with pytest.raises(SourceError, match=rf"{topic}\[0\] should go on at offset 30.*from 70 on \(40 lost\)"):
        eventually(lambda: values_of(source))
    assert source.positions() == {Partition(topic, 0): 30}


def test_no_gap_at_the_first_record_that_is_left(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 100))
    kafka.delete_before(topic, 70)
    source = kafka.source(topic, on_gap="stop")
    source.seek({Partition(topic, 0): 70})
    assert read_to_the_end(source) == numbered(70, 100)
    assert source.take_gaps() == []


def test_a_position_past_the_end_means_that_the_log_has_begun_anew(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 10))
    source = kafka.source(topic)
    source.seek({Partition(topic, 0): 500})
    assert read_to_the_end(source) == numbered(0, 10)
    [gap] = source.take_gaps()
    assert (gap.expected, gap.found, gap.lost) == (500, 0, 0)


@pytest.mark.apache_kafka
@pytest.mark.parametrize("count", [5, 40])
def test_a_topic_that_is_made_anew_while_reading_is_read_whole(kafka: Kafka, count: int) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 20))
    source = kafka.source(topic)
    assert read(source, 20) == numbered(0, 20)
    with kafka.admin() as admin:
        admin.delete_topics([topic])
    poll_until(source, lambda: not source.connected)
    create_topic(kafka.servers, topic)
    kafka.send(topic, numbered(100, 100 + count))
    assert read_to_the_end(source) == numbered(100, 100 + count)
    assert [(gap.expected, gap.found) for gap in source.take_gaps()] == [(20, 0)]
    assert source.connected


def make_anew(kafka: Kafka, topic: str, partitions: int = 1) -> None:
    """Delete a topic, and create it again."""
    with kafka.admin() as admin:
        admin.delete_topics([topic])
        eventually(lambda: topic not in admin.list_topics(), 60)
    eventually(lambda: created(kafka, topic, partitions), 60)


def created(kafka: Kafka, topic: str, partitions: int) -> bool:
    try:
        create_topic(kafka.servers, topic, partitions)
    except TopicAlreadyExistsError:  # not gone yet everywhere
        return False
    return True


@pytest.mark.apache_kafka
@pytest.mark.parametrize("count", [5, 20, 40])
def test_a_topic_that_was_made_anew_while_nobody_read_is_read_whole(kafka: Kafka, count: int) -> None:
    """Even where it is as long as the old position, or longer: a topic's id tells."""
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 20))
    before = kafka.source(topic)
    assert read(before, 20) == numbered(0, 20)
    positions, topic_ids = before.positions(), before.topic_ids()
    before.close()
    make_anew(kafka, topic)
    kafka.send(topic, numbered(100, 100 + count))
    source = kafka.source(topic)
    source.seek(positions, topic_ids)
    assert source.topic_ids() == topic_ids
    assert read_to_the_end(source) == numbered(100, 100 + count)
    assert [(gap.expected, gap.found, gap.lost) for gap in source.take_gaps()] == [(20, 0, 0)]
    assert source.positions() == {Partition(topic, 0): count}
    assert source.topic_ids().keys() == topic_ids.keys()
    assert source.topic_ids() != topic_ids


@pytest.mark.apache_kafka
@pytest.mark.parametrize("reading", [True, False])
def test_a_topic_that_is_made_anew_with_fewer_partitions_is_read_whole(kafka: Kafka, reading: bool) -> None:
    """And a partition that is added later on does not begin where its namesake had been."""
    topic = kafka.topic(2)
    for partition in range(2):
        kafka.send(topic, numbered(0, 20), partition)
    source = kafka.source(topic)
    assert sorted(read(source, 40)) == sorted(2 * numbered(0, 20))
    if not reading:
        source.close()
    make_anew(kafka, topic)
    kafka.send(topic, numbered(100, 130))
    if not reading:
        before, source = source, kafka.source(topic)
        source.seek(before.positions(), before.topic_ids())
    assert read(source, 30) == numbered(100, 130)
    poll_until(source, lambda: source.caught_up and source.connected)
    assert source.positions() == {Partition(topic, 0): 30}
    with kafka.admin() as admin:
        admin.create_partitions({topic: 2})
    kafka.send(topic, numbered(200, 230), 1)
    assert read(source, 30) == numbered(200, 230)


@pytest.mark.apache_kafka
def test_a_topic_made_anew_stops_a_source_that_must_not_lose_anything(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 20))
    before = kafka.source(topic)
    read(before, 20)
    before.close()
    make_anew(kafka, topic)
    kafka.send(topic, numbered(100, 140))
    source = kafka.source(topic, on_gap="stop")
    source.seek(before.positions(), before.topic_ids())
    with pytest.raises(SourceError, match="20, but the topic was made anew"):
        read(source, 1)


# Transactions.


@pytest.mark.apache_kafka
def test_aborted_records_are_left_out_and_markers_are_passed(kafka: Kafka) -> None:
    topic = kafka.topic()
    producer = KafkaProducer(bootstrap_servers=kafka.servers, transactional_id=topic)
    producer.init_transactions()
    for n, commit in enumerate([True, False, True, False]):
        producer.begin_transaction()
        for value in numbered(10 * n, 10 * n + 10):
            producer.send(topic, value, partition=0)
        producer.flush()
        producer.commit_transaction() if commit else producer.abort_transaction()
    producer.close()
    source = kafka.source(topic)
    assert read_to_the_end(source) == numbered(0, 10) + numbered(20, 30)
    # 40 records and 4 markers
    assert source.positions() == {Partition(topic, 0): 44}
    eventually(lambda: source.lag() == {Partition(topic, 0): 0}, what="no lag")


@pytest.mark.apache_kafka
def test_an_open_transaction_is_no_lag_and_its_records_come_when_it_is_committed(kafka: Kafka) -> None:
    topic = kafka.topic()
    producer = KafkaProducer(bootstrap_servers=kafka.servers, transactional_id=topic)
    producer.init_transactions()
    kafka.send(topic, numbered(0, 5))
    producer.begin_transaction()
    for value in numbered(5, 10):
        producer.send(topic, value, partition=0)
    producer.flush()
    kafka.send(topic, numbered(10, 15))
    source = kafka.source(topic)
    assert read_to_the_end(source) == numbered(0, 5)
    assert source.positions() == {Partition(topic, 0): 5}
    producer.commit_transaction()
    producer.close()
    assert read(source, 10) == numbered(5, 15)
    poll_until(source, lambda: source.caught_up)
    assert source.positions() == {Partition(topic, 0): 16}


@pytest.mark.apache_kafka
def test_uncommitted_records_can_be_asked_for(kafka: Kafka) -> None:
    topic = kafka.topic()
    producer = KafkaProducer(bootstrap_servers=kafka.servers, transactional_id=topic)
    producer.init_transactions()
    producer.begin_transaction()
    for value in numbered(0, 10):
        producer.send(topic, value, partition=0)
    producer.flush()
    assert read_to_the_end(kafka.source(topic, isolation_level="read_uncommitted")) == numbered(0, 10)
    producer.abort_transaction()
    producer.close()


# Records that cannot be read.


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_every_codec_is_read_by_a_default_install(kafka: Kafka, codec: str) -> None:
    topic = kafka.topic()
    values = [b"%d " % n * 50 for n in range(20)]
    kafka.send(topic, values, compression_type=codec, linger_ms=20)
    assert read_to_the_end(kafka.source(topic)) == values


@pytest.mark.apache_kafka
@pytest.mark.parametrize(("codec", "error"), [(None, "CorruptRecordError"), (7, "Unrecognized compression type")])
def test_a_record_that_cannot_be_read_stops_its_partition_by_name(
    own_kafka: Kafka, codec: int | None, error: str
) -> None:
    topic = own_kafka.topic(2)
    for value in numbered(0, 10):
        own_kafka.send(topic, [value], partition=0)  # a batch each
    own_kafka.send(topic, numbered(10, 20), partition=1)
    own_kafka.broker.stop()
    segment = own_kafka.broker.data_dir / "data" / f"{topic}-0" / f"{0:020d}.log"
    spoil(segment, 6, codec=codec)
    own_kafka.broker.start()
    source = own_kafka.source(topic)
    values: list[bytes | None] = []
    eventually(lambda: values.extend(values_of(source)) or source.stopped, 60)
    assert list(source.stopped) == [Partition(topic, 0)]
    assert error in source.stopped[Partition(topic, 0)]
    # The other partition goes on, and the one that is stopped stays where it is.
    own_kafka.send(topic, numbered(20, 30), partition=1)
    values += read_to_the_end(source)
    assert sorted(values, key=int) == numbered(0, 6) + numbered(10, 30)  # type: ignore[arg-type]
    assert source.positions() == {Partition(topic, 0): 6, Partition(topic, 1): 20}
    assert source.lag()[Partition(topic, 0)] == 4


# Weather.


def test_a_broker_that_comes_up_after_the_source_is_waited_for(own_kafka: Kafka) -> None:
    topic = own_kafka.topic()
    own_kafka.broker.stop()
    source = own_kafka.source(topic)
    for _ in range(3):
        assert source.poll(0.01) is None
        assert not source.connected
        assert source.lag() == source.positions() == {}
    own_kafka.broker.start()
    own_kafka.send(topic, numbered(0, 10))
    assert read(source, 10) == numbered(0, 10)


def until_disconnected(source: KafkaSource) -> list[bytes | None]:
    """What still comes before the source notices that the broker is away."""
    values: list[bytes | None] = []
    eventually(lambda: values.extend(values_of(source)) or not source.connected, 60, "disconnected")
    return values


def test_a_broker_restart_loses_nothing_and_repeats_nothing(own_kafka: Kafka) -> None:
    topic = own_kafka.topic()
    source = own_kafka.source(topic, max_poll_records=30)
    own_kafka.send(topic, numbered(0, 100))
    values = read(source, 30)
    own_kafka.broker.stop()
    values += until_disconnected(source)
    own_kafka.broker.start()
    own_kafka.send(topic, numbered(100, 200))
    values += read_to_the_end(source)
    assert values == numbered(0, 200)
    assert source.connected
    assert source.take_gaps() == []


def test_a_broker_that_comes_back_under_another_address_is_found(own_kafka: Kafka) -> None:
    topic, broker, port = own_kafka.topic(), own_kafka.broker, free_port()
    servers = f"{own_kafka.servers},127.0.0.1:{port}"
    own_kafka.send(topic, numbered(0, 10))
    source = own_kafka.source(topic, bootstrap_servers=servers, group_id=topic)
    assert read(source, 10) == numbered(0, 10)
    broker.stop()
    with type(broker)(broker.data_dir, port) as moved:
        kafka = Kafka(moved)
        kafka.send(topic, numbered(10, 20))
        assert read(source, 10) == numbered(10, 20)
        source.commit(source.positions())
        eventually(lambda: kafka.committed(topic) == {Partition(topic, 0): 20}, 60, "the commit")


def test_a_broker_that_no_longer_answers_holds_nothing_up(own_kafka: Kafka) -> None:
    topic = own_kafka.topic()
    source = own_kafka.source(topic, group_id=topic)
    own_kafka.send(topic, numbered(0, 10))
    assert read(source, 10) == numbered(0, 10)
    source.commit({Partition(topic, 0): 3})
    eventually(lambda: own_kafka.committed(topic) == {Partition(topic, 0): 3}, what="the first commit")
    own_kafka.broker.pause()
    # Everything returns, and the position stays.
    for position in range(4, 11):
        source.commit({Partition(topic, 0): position})
    assert until_disconnected(source) == []
    assert source.positions() == {Partition(topic, 0): 10}
    own_kafka.broker.resume()
    eventually(lambda: values_of(source) or source.connected, 60, "connected again")
    eventually(lambda: own_kafka.committed(topic) == {Partition(topic, 0): 10}, 60, "the last commit")
    own_kafka.send(topic, numbered(10, 20))
    assert read(source, 10) == numbered(10, 20)


def test_a_source_can_be_closed_while_the_broker_does_not_answer(own_kafka: Kafka) -> None:
    topic = own_kafka.topic()
    source = own_kafka.source(topic)
    own_kafka.send(topic, numbered(0, 10))
    assert read(source, 10) == numbered(0, 10)
    own_kafka.broker.pause()
    source.commit(source.positions())
    source.close()
    own_kafka.broker.resume()
    assert source.poll(0.01) is None


def test_a_long_pause_between_polls_changes_nothing(kafka: Kafka) -> None:
    topic = kafka.topic()
    kafka.send(topic, numbered(0, 10))
    limit_ms = 1000
    source = kafka.source(topic, max_poll_records=5, request_timeout_ms=limit_ms, metadata_max_age_ms=100)
    assert read(source, 5) == numbered(0, 5)
    # A step that is longer than all limits: time enough for another source to come, wait and go.
    other = kafka.source(new_name())
    for _ in range(3 * limit_ms // 50):
        assert other.poll(0.05) is None
    assert read(source, 5) == numbered(5, 10)
    assert read_to_the_end(source) == []


# Commits, for dashboards.


def test_what_is_committed_only_grows(kafka: Kafka) -> None:
    topic = kafka.topic(2)
    source = kafka.source(topic, group_id=topic)
    first, second = Partition(topic, 0), Partition(topic, 1)
    source.commit({first: 5})  # nothing is known of the topic yet
    poll_until(source, source.positions)
    eventually(lambda: kafka.committed(topic) == {first: 5}, what="the first commit")
    source.commit({first: 3, second: 7})
    eventually(lambda: kafka.committed(topic) == {first: 5, second: 7}, what="the second commit")
    source.commit({first: 8, second: 1})
    eventually(lambda: kafka.committed(topic) == {first: 8, second: 7}, what="the third commit")


def test_an_older_checkpoint_rewinds_what_is_committed(kafka: Kafka) -> None:
    topic = kafka.topic()
    partition = Partition(topic, 0)
    source = kafka.source(topic, group_id=topic)
    poll_until(source, source.positions)
    source.commit({partition: 5})
    eventually(lambda: kafka.committed(topic) == {partition: 5}, what="the commit")
    source.rewind({partition: 2})
    eventually(lambda: kafka.committed(topic) == {partition: 2}, what="the rewound commit")


def test_the_last_commit_is_made_before_the_source_is_closed(kafka: Kafka) -> None:
    topic = kafka.topic()
    source = kafka.source(topic, group_id=topic)
    poll_until(source, lambda: source.caught_up)
    source.commit({Partition(topic, 0): 9})
    source.close()
    assert kafka.committed(topic) == {Partition(topic, 0): 9}


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"security_protocol": "SSL", "ssl_cafile": "/nowhere/ca.pem"}, "kafka.ssl_cafile '/nowhere/ca.pem'"),
        ({"security_protocol": "SSL", "ssl_certfile": "/nowhere/c.pem"}, "kafka.ssl_certfile '/nowhere/c.pem'"),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI"},
            "kafka.sasl_mechanism GSSAPI needs the package gssapi",
        ),
        ({"topics": ("two words",)}, "kafka.topics"),
        ({"request_timeout_ms": 1000, "fetch_max_wait_ms": 2000}, "request_timeout_ms"),
    ],
)
def test_settings_that_cannot_work_are_an_error_that_names_them(
    kafka: Kafka, settings: dict[str, Any], message: str
) -> None:
    source = KafkaSource(KafkaSettings(**{"bootstrap_servers": kafka.servers} | settings))
    with pytest.raises(SourceError) as error:
        eventually(lambda: source.poll(0.01))
    assert message in str(error.value)
    source.close()
