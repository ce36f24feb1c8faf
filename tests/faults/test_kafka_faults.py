"""What a worker meets in a topic: gaps, growth, broken and strange records, transactions, positions of others."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from redis import Redis

from replay.local_stack import Broker, create_topic
from tests.clicks import MakeWorker, Send, clicks, published
from tests.faults.own_kafka import (
    GROUP,
    admin,
    assert_learned,
    commit,
    committed,
    complaints,
    delete_before,
    saved_position,
    send_to,
)
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = [pytest.mark.faults, pytest.mark.integration]

# A checkpoint is saved only at the start of a model, where these say, and at the stop.
SELDOM = {"checkpoint__every_s": 3600, "checkpoint__every_events": 1_000_000}
OTHER_CODECS = "gzip", "snappy", "lz4"
QUICK = {"kafka__metadata_max_age_ms": 200}


def stopped(worker: WorkerProcess) -> WorkerProcess:
    """The worker, stopped in good order."""
    assert worker.stop() == 0, worker.describe()
    return worker


def saved(worker: WorkerProcess, records: int) -> None:
    """Wait for a checkpoint of so many records."""

    def there() -> bool:
        return any(one.header and one.header.records == records for one in worker.checkpoints()[:1])

    eventually(there, 60, worker.describe)


# Positions.


def test_after_a_kill_reading_goes_on_where_the_checkpoint_says_whatever_is_committed(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """K1: 600 learned and saved, 400 more delivered and learned, kill -9; somebody commits far ahead for the group."""
    values, users, items = clicks(1000)
    worker = make_worker(**SELDOM | {"checkpoint__every_events": 600}).start()
    send(values[:600])
    worker.wait_read(600)
    saved(worker, 600)
    send(values[600:])
    worker.wait_read(1000)
    worker.kill()
    commit(broker.bootstrap_servers, topic, 5000)
    worker.start()
    beat = worker.wait_read(1000)
    assert [line["records"] for line in worker.logged("resumed")] == [600]
    assert [line["position"] for line in worker.logged("reading")] == [600]
    assert (beat["events_learned"], beat["events_duplicate"]) == ("1000", "0")
    stopped(worker)
    assert_learned(worker, users, items)
    assert committed(broker.bootstrap_servers, topic) == 1000


@pytest.mark.slow
def test_committed_offsets_only_grow_within_a_run(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """K5: checkpoint after checkpoint; what the group has committed is watched all the while."""
    seen: list[int] = []

    def watch() -> bool:
        seen.append(committed(broker.bootstrap_servers, topic) or 0)
        return seen[-1] == saved_position(worker, topic) == worker.metric("freshet_position")

    worker = make_worker(**SELDOM | {"checkpoint__every_events": 50}).start()
    for part in range(1, 11):
        send(clicks(50, seed=part)[0])
        worker.wait_read(50 * part)
        eventually(watch, 60, worker.describe)
    assert seen == sorted(seen)
    assert len(set(seen)) > 5
    stopped(worker)
    assert committed(broker.bootstrap_servers, topic) == 500


def test_an_older_checkpoint_that_has_to_do_has_its_positions_committed_loudly(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """K5: a byte of the newest checkpoint is flipped; the events after the one before it are learned once more."""
    values, users, items = clicks(800)
    worker = make_worker(**SELDOM)
    for part, until in ((values[:500], 500), (values[500:], 800)):
        send(part)
        worker.start().wait_read(until)
        stopped(worker)
    assert committed(broker.bootstrap_servers, topic) == 800
    damaged = worker.checkpoints()[0].path
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    worker.start()
    eventually(lambda: committed(broker.bootstrap_servers, topic) == 500, 60, worker.describe)
    assert [line["path"] for line in worker.logged("checkpoint_damaged")] == [str(damaged)]
    assert [line["positions"] for line in worker.logged("positions_rewound")] == [{f"{topic}[0]": 500}]
    worker.wait_read(800)
    stopped(worker)
    assert_learned(worker, users, items)
    assert committed(broker.bootstrap_servers, topic) == 800


@pytest.mark.slow
@pytest.mark.apache_kafka
def test_a_group_that_somebody_else_uses_holds_nothing_up(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """Its members' offsets are not ours to commit: told, and tried again until they are gone."""
    values, users, items = clicks(300)
    member = KafkaConsumer(topic, bootstrap_servers=broker.bootstrap_servers, group_id=GROUP, enable_auto_commit=False)
    eventually(lambda: member.poll(100) or member.assignment(), 60, "a member of the group")
    worker = make_worker(**SELDOM | {"checkpoint__every_events": 100}).start().wait_ready()
    send(values[:200])
    worker.wait_read(200)
    eventually(lambda: saved_position(worker, topic) > 0, 60, worker.describe)
    eventually(lambda: member.poll(10) or worker.logged("kafka_offsets_failed"), 60, worker.describe)
    worker.wait_ready()
    assert len(complaints(worker)) <= 3, complaints(worker)
    member.close()
    send(values[200:])
    worker.wait_read(300)
    eventually(lambda: (committed(broker.bootstrap_servers, topic) or 0) > 0, 60, worker.describe)
    stopped(worker)
    assert committed(broker.bootstrap_servers, topic) == 300
    assert_learned(worker, users, items)


# Topics that change.


def test_a_partition_that_is_added_is_read_from_its_beginning_without_a_restart(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """K2: even by a worker that was to start at the end; and after a restart it goes on in both."""
    values, users, items = clicks(600)
    worker = make_worker(kafka__start="latest", **QUICK).start().wait_ready()
    send(values[:100])
    worker.wait_read(100)
    with admin(broker.bootstrap_servers) as client:
        client.create_partitions({topic: 3})
    send_to(broker.bootstrap_servers, topic, values[100:300], partition=2)
    worker.wait_read(300)
    send_to(broker.bootstrap_servers, topic, values[300:400], partition=1)
    worker.wait_read(400)
    for n, position in enumerate((100, 100, 200)):
        at = {"topic": topic, "partition": str(n)}
        eventually(lambda at=at, position=position: worker.metric("freshet_position", **at) == position, 60)
    stopped(worker)
    send_to(broker.bootstrap_servers, topic, values[400:], partition=2)
    worker.start().wait_read(600)
    stopped(worker)
    assert_learned(worker, users, items)
    assert [saved_position(worker, topic, n) for n in range(3)] == [100, 100, 400]


@pytest.mark.slow
@pytest.mark.apache_kafka
def test_a_topic_that_is_made_anew_with_fewer_records_is_read_whole(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """The topic is deleted and comes back shorter while the worker runs; both lives of it count once."""
    first, second = clicks(500), clicks(200, seed=1, prefix="second-")
    worker = make_worker(**QUICK).start().wait_ready()
    send(first[0])
    worker.wait_read(500)
    with admin(broker.bootstrap_servers) as client:
        client.delete_topics([topic])
    eventually(lambda: "not there" in worker.reasons().get("kafka", ""), 60, worker.describe)
    assert worker.get("/healthz")[0] == 200
    create_topic(broker.bootstrap_servers, topic)
    send_to(broker.bootstrap_servers, topic, second[0])
    worker.wait_read(700)
    worker.wait_ready()
    assert [(line["expected"], line["found"]) for line in worker.logged("gap")] == [(500, 0)]
    stopped(worker)
    assert_learned(worker, first[1] + second[1], first[2] + second[2])
    eventually(lambda: committed(broker.bootstrap_servers, topic) == 200, 60, "the commit goes back with the topic")


@pytest.mark.slow
@pytest.mark.apache_kafka
def test_a_topic_that_was_made_anew_while_no_worker_ran_is_read_whole(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """The new one is longer already than the saved position: only its id tells it from the old one."""
    first, second = clicks(200), clicks(500, seed=1, prefix="second-")
    worker = make_worker(**QUICK)
    send(first[0])
    worker.start().wait_read(200)
    stopped(worker)
    with admin(broker.bootstrap_servers) as client:
        client.delete_topics([topic])
        eventually(lambda: topic not in client.list_topics(), 60)
    create_topic(broker.bootstrap_servers, topic)
    send_to(broker.bootstrap_servers, topic, second[0])
    worker.start().wait_read(700)
    worker.wait_ready()
    assert [(line["expected"], line["found"]) for line in worker.logged("gap")] == [(200, 0)]
    stopped(worker)
    assert saved_position(worker, topic) == 500
    worker.start().wait_ready()
    assert not worker.logged("gap"), "it is the topic that the checkpoint names now"
    stopped(worker)
    assert_learned(worker, first[1] + second[1], first[2] + second[2])


def behind_retention(make: MakeWorker, send: Send, broker: Broker, topic: str) -> tuple[WorkerProcess, Counter[str]]:
    """A worker that has stopped at 100, on a topic that begins at 350 and ends at 500; users of what is left."""
    values, *_ = clicks(500)
    worker = make(**SELDOM)
    send(values[:100])
    worker.start().wait_read(100)
    stopped(worker)
    send(values[100:])
    delete_before(broker.bootstrap_servers, topic, 350)
    whole, missing = clicks(500)[1], clicks(350)[1]
    assert sum(whole.values()) - sum(missing.values()) == 150
    return worker, whole


def test_a_gap_is_counted_logged_and_passed(make_worker: MakeWorker, send: Send, broker: Broker, topic: str) -> None:
    """K6: the checkpoint says 100, the log begins at 350, and the settings say: go on."""
    worker, _ = behind_retention(make_worker, send, broker, topic)
    beat = worker.start().wait_read(250)
    assert beat["events_learned"] == "250"
    eventually(lambda: worker.metric("freshet_gap_records_total", topic=topic, partition="0") == 250, 60)
    [gap] = worker.logged("gap")
    assert (gap["level"], gap["topic"], gap["partition"]) == ("error", topic, 0)
    assert (gap["expected"], gap["found"], gap["lost"]) == (100, 350, 250)
    worker.wait_ready()
    stopped(worker)
    assert saved_position(worker, topic) == 500


@pytest.mark.slow
def test_a_gap_stops_a_worker_that_must_not_lose_anything(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """K6: the settings say: stop. One line says what is missing and what to do; the checkpoint stays as it is."""
    worker, _ = behind_retention(make_worker, send, broker, topic)
    worker.settings["FRESHET_KAFKA__ON_GAP"] = "stop"
    before = [one.path for one in worker.checkpoints()]
    assert worker.start().wait() == 2, worker.describe()
    [error] = [line for line in worker.log.splitlines() if line.startswith("error: ")]
    assert f"{topic}[0] should go on at offset 100, but the log has it only from 350 on (250 lost)" in error
    assert "kafka.on_gap=continue" in error
    assert "Traceback" not in worker.log
    assert [one.path for one in worker.checkpoints()] == before
    assert saved_position(worker, topic) == 100


# Records.


def dead_letters(broker: Broker, topic: str, count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Values and headers of what is in the dead-letter topic; fails when there is more."""
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest")
    at = TopicPartition(f"{topic}.dead-letter", 0)
    consumer.assign([at])
    consumer.seek_to_beginning(at)
    found: list[tuple[bytes, dict[str, str]]] = []

    def read() -> bool:
        records = [record for batch in consumer.poll(200).values() for record in batch]
        found.extend((record.value, {name: value.decode() for name, value in record.headers}) for record in records)
        return consumer.position(at) == consumer.end_offsets([at])[at] and len(found) >= count

    eventually(read, 60, lambda: f"{count} dead letters: {found}")
    consumer.close()
    assert len(found) == count
    return found


@pytest.mark.quick
def test_a_record_that_is_no_json_is_rejected_once_and_passed(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """K7: counted, dead-lettered with its origin and reason; the position moves on, also over a restart."""
    values, users, items = clicks(300)
    create_topic(broker.bootstrap_servers, f"{topic}.dead-letter")
    send([*values[:100], b"\xff{", *values[100:200], b"\xff{"])
    worker = make_worker(**SELDOM).start()
    worker.wait_read(202)
    stopped(worker)
    assert saved_position(worker, topic) == 202
    send(values[200:])
    beat = worker.start().wait_read(302)
    assert (beat["events_learned"], beat["events_rejected"], beat["rejected_not_utf8"]) == ("300", "2", "2")
    stopped(worker)
    assert_learned(worker, users, items)
    letters = dead_letters(broker, topic, 2)
    assert [value for value, _ in letters] == [b"\xff{"] * 2
    assert [headers["freshet-offset"] for _, headers in letters] == ["100", "201"]
    assert {headers["freshet-reason"] for _, headers in letters} == {"not_utf8"}


@pytest.mark.slow
@pytest.mark.quick
def test_a_tombstone_is_skipped_and_counted(make_worker: MakeWorker, send: Send, topic: str) -> None:
    """K8: alone in a poll, at the end, and among others."""
    values, users, items = clicks(300)
    worker = make_worker().start()
    send([None])
    worker.wait_read(1)
    send([*values[:150], None, None, *values[150:], None])
    beat = worker.wait_read(304)
    assert (beat["events_learned"], beat["events_tombstone"], beat["events_rejected"]) == ("300", "4", "0")
    stopped(worker)
    assert saved_position(worker, topic) == 304
    assert_learned(worker, users, items)


@pytest.mark.slow
def test_a_record_that_is_larger_than_a_fetch_is_rejected_and_passed(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """Megabytes in one record, more than a fetch asks for and more than the dead-letter topic takes."""
    values, users, items = clicks(200)
    name, limit = f"{topic}-large", 20_000_000
    create_topic(broker.bootstrap_servers, name, configs={"max.message.bytes": str(limit)})
    create_topic(broker.bootstrap_servers, f"{name}.dead-letter")
    huge = b'{"user_id": "u", "item_id": "i", "note": "' + b"x" * 5_000_000 + b'"}'
    send_to(broker.bootstrap_servers, name, [*values[:100], huge, *values[100:]], max_request_size=limit)
    worker = make_worker(topic=name).start()
    beat = worker.wait_read(201)
    assert (beat["events_learned"], beat["events_rejected"], beat["rejected_too_large"]) == ("200", "1", "1")
    stopped(worker)
    assert_learned(worker, users, items)
    [(value, headers)] = dead_letters(broker, name, 1)
    assert huge.startswith(value)
    assert headers["freshet-truncated"] == str(len(huge))


@pytest.mark.slow
@pytest.mark.apache_kafka
def test_records_without_a_time_or_from_the_far_future_do_no_harm(
    make_worker: MakeWorker, broker: Broker, topic: str, redis_client: Redis
) -> None:
    """Kafka's timestamp is -1 or a hundred years ahead: an event without any time is rejected; freshness stays sane."""
    values, users, items = clicks(300)
    name = f"{topic}-times"
    # no retention: to it these records are old
    configs = {"message.timestamp.after.max.ms": str(2**63 - 1), "retention.ms": "-1"}
    create_topic(broker.bootstrap_servers, name, configs=configs)
    now = datetime.now(UTC)
    ahead = int((now + timedelta(days=36_500)).timestamp() * 1000)
    timed: list[bytes | None] = [
        json.dumps(json.loads(v) | {"timestamp": now.isoformat()}).encode() for v in values if v
    ]
    worker = make_worker(topic=name).start().wait_ready()
    send_to(broker.bootstrap_servers, name, values[:50], timestamp_ms=-1)
    send_to(broker.bootstrap_servers, name, timed[:100], timestamp_ms=-1)
    send_to(broker.bootstrap_servers, name, values[100:200], timestamp_ms=ahead)
    worker.wait_read(250)
    send_to(broker.bootstrap_servers, name, values[200:])
    beat = worker.wait_read(350)
    assert (beat["events_learned"], beat["events_rejected"], beat["rejected_bad_timestamp"]) == ("300", "50", "50")
    eventually(lambda: published(redis_client, "user") == dict(users), 60, worker.describe)
    eventually(lambda: worker.metric("freshet_freshness_seconds_count") == 200, 60, worker.describe)
    assert worker.metric("freshet_freshness_seconds_sum") < 200 * 120
    stopped(worker)
    assert_learned(worker, users, items)


@pytest.mark.parametrize("codec", [*(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_CODECS), "zstd"])
def test_compressed_topics_are_learned(make_worker: MakeWorker, broker: Broker, topic: str, codec: str) -> None:
    """K14: all four codecs, by a default install."""
    values, users, items = clicks(400)
    send_to(broker.bootstrap_servers, topic, values, compression_type=codec, linger_ms=50)
    worker = make_worker().start()
    worker.wait_read(400)
    stopped(worker)
    assert complaints(worker) == []
    assert_learned(worker, users, items)


# Transactions.


@pytest.mark.apache_kafka
def test_committed_transactions_are_learned_aborted_ones_are_not_and_an_open_one_holds_back(
    make_worker: MakeWorker, broker: Broker, topic: str
) -> None:
    """K13: in one partition. Lag reaches 0 although offsets have gaps; positions move past the markers."""
    values, users, items = clicks(600)
    aborted, _, _ = clicks(100, prefix="aborted-")
    worker = make_worker(**SELDOM).start().wait_ready()
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=topic)
    producer.init_transactions()
    for part, end in (
        (values[:200], producer.commit_transaction),
        (aborted, producer.abort_transaction),
        (values[200:300], producer.commit_transaction),
    ):
        transaction(producer, topic, part)
        end()
    worker.wait_read(300)
    # 400 records and 3 markers
    eventually(lambda: worker.metric("freshet_position") == 403, 60, worker.describe)
    eventually(lambda: worker.metric("freshet_lag") == 0, 60, worker.describe)
    transaction(producer, topic, values[300:400])
    send_to(broker.bootstrap_servers, topic, values[400:500])
    eventually(lambda: end_of(broker, topic) == 603, 60)
    stopped(worker)  # while it is open: the position must stay before it
    assert saved_position(worker, topic) == 403
    worker.start().wait_ready()
    assert worker.metric("freshet_records_total") == 0
    producer.commit_transaction()
    producer.close()
    send_to(broker.bootstrap_servers, topic, values[500:])
    worker.wait_read(600)
    eventually(lambda: worker.metric("freshet_position") == 704, 60, worker.describe)
    eventually(lambda: worker.metric("freshet_lag") == 0, 60, worker.describe)
    stopped(worker)
    assert_learned(worker, users, items)


def transaction(producer: KafkaProducer, topic: str, values: list[bytes | None]) -> None:
    """Begin one, with these records in it."""
    producer.begin_transaction()
    for value in values:
        producer.send(topic, value, partition=0)
    producer.flush()


def end_of(broker: Broker, topic: str) -> int:
    """The end of partition 0, open transactions included."""
    at = TopicPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap_servers)
    try:
        return int(consumer.end_offsets([at])[at])
    finally:
        consumer.close()


# Dead letters that cannot be written.


@pytest.mark.slow
@pytest.mark.apache_kafka
def test_dead_letters_without_a_topic_wait_in_a_bounded_buffer_and_hold_nothing_up(
    make_worker: MakeWorker, send: Send, broker: Broker, topic: str
) -> None:
    """The broker makes no topics by itself: 10 wait, 40 are dropped and counted; then the topic is made."""
    values, users, items = clicks(600)
    worker = make_worker(kafka__dead_letter_buffer=10, **SELDOM | {"checkpoint__every_events": 300}).start()
    send([*values[:300], *[b"no json"] * 50])
    worker.wait_read(350)
    eventually(lambda: worker.metric("freshet_dead_letter_dropped_total") == 40, 60, worker.describe)
    saved(worker, 350)
    worker.wait_ready()
    assert sum(int(line["records"]) for line in worker.logged("dead_letters_dropped")) == 40
    assert len(worker.logged("dead_letters_dropped")) <= 5  # ranges of offsets, not a line each
    create_topic(broker.bootstrap_servers, f"{topic}.dead-letter")
    assert len(dead_letters(broker, topic, 10)) == 10
    send([*values[300:], b"no json"])
    beat = worker.wait_read(651)
    assert (beat["events_learned"], beat["events_rejected"]) == ("600", "51")
    assert len(dead_letters(broker, topic, 11)) == 11
    assert worker.metric("freshet_dead_letter_dropped_total") == 40
    stopped(worker)
    assert_learned(worker, users, items)
