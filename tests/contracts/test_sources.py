"""Every source keeps the same promises: order, positions that can be resumed from, an end that is told."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer

from replay.local_stack import Broker
from tests.waiting import eventually
from worker.file_source import FileSource, JsonLines
from worker.kafka_source import KafkaSource
from worker.settings import KafkaSettings
from worker.source import Positions, Records, Source, SourceError

VALUES: list[bytes] = [b'{"n": %d}' % n for n in range(57)]
CHUNK = 10
BEGAN_MS = int(time.time() * 1000)  # a broker deletes records that are older than its retention

Open = Callable[[], Source]  # a new source on a stream that holds VALUES


def polled(source: Source) -> Records:
    """The next records; fails if none come."""
    return eventually(lambda: source.poll(0.1), what="records")


def rest(source: Source) -> list[bytes | None]:
    """Everything that is left."""
    values: list[bytes | None] = []

    def at_the_end() -> bool:
        records = source.poll(0.05)
        values.extend(records.values if records else ())
        return records is None and source.caught_up

    eventually(at_the_end, what="the end")
    return values


class SourceContract:
    """What a subclass says of its fixture `stream`."""

    def test_all_records_come_in_order(self, stream: Open) -> None:
        assert rest(stream()) == VALUES

    def test_a_poll_brings_a_bounded_number_of_records_in_columns(self, stream: Open) -> None:
        records = polled(stream())
        assert 1 <= len(records.values) <= CHUNK
        assert len(records.timestamps_ms) == len(records.values)

    def test_the_position_is_the_next_record_and_never_past_what_was_returned(self, stream: Open) -> None:
        source = stream()
        returned = 0
        while returned < len(VALUES):
            records = polled(source)
            returned += len(records.values)
            assert list(source.positions().values()) == [returned]

    def test_an_empty_poll_returns_none_and_leaves_the_position(self, stream: Open) -> None:
        source = stream()
        rest(source)
        assert source.poll(0.01) is None
        assert list(source.positions().values()) == [len(VALUES)]

    @pytest.mark.parametrize("polls", [0, 1, 3, 6])
    def test_another_source_reads_on_from_the_positions_and_gets_exactly_the_rest(
        self, stream: Open, polls: int
    ) -> None:
        first = stream()
        read = [value for _ in range(polls) for value in polled(first).values]
        positions: Positions = first.positions()
        first.close()
        second = stream()
        second.seek(positions, first.topic_ids())
        assert second.positions() == positions
        assert read + rest(second) == VALUES

    def test_a_source_can_be_sought_forward_while_it_is_read(self, stream: Open) -> None:
        source = stream()
        polled(source)
        [partition] = source.positions()
        source.seek({partition: 50})
        assert rest(source) == VALUES[50:]

    def test_a_seek_to_nothing_in_particular_begins_at_the_beginning(self, stream: Open) -> None:
        source = stream()
        source.seek({})
        assert rest(source) == VALUES

    def test_a_seek_to_the_end_leaves_nothing(self, stream: Open) -> None:
        source = stream()
        rest(source)
        end = source.positions()
        again = stream()
        again.seek(end)
        assert rest(again) == []
        assert again.positions() == end

    def test_the_lag_is_what_is_left(self, stream: Open) -> None:
        source = stream()
        first = len(polled(source).values)
        assert not source.caught_up
        if source.lag() or isinstance(source, KafkaSource):  # a file's length may not be known
            eventually(lambda: list(source.lag().values()) == [len(VALUES) - first], what="the lag")
        rest(source)
        assert source.caught_up
        assert list(source.lag().values()) == [0]

    def test_an_origin_names_the_record(self, stream: Open) -> None:
        source = stream()
        polled(source)
        [before] = source.positions().values()
        records = polled(source)
        [(partition, position)] = source.positions().items()
        origin = records.origin(len(records.values) - 1)
        assert (origin.partition, origin.offset) == (partition, position - 1)
        assert (origin.value, origin.timestamp_ms) == (records.values[-1], records.timestamps_ms[-1])
        assert records.origin(0).offset == before

    def test_a_sound_stream_is_connected_and_has_no_faults(self, stream: Open) -> None:
        source = stream()
        rest(source)
        assert source.connected
        assert source.take_gaps() == []
        assert not source.stopped

    def test_positions_can_be_told_to_the_outside_at_any_time(self, stream: Open) -> None:
        source = stream()
        source.commit(source.positions())
        rest(source)
        source.commit(source.positions())
        source.rewind(source.positions())

    def test_closing_twice_is_closing_once_and_nothing_comes_any_more(self, stream: Open) -> None:
        source = stream()
        polled(source)
        positions = source.positions()
        source.close()
        source.close()
        assert source.poll(0.01) is None
        assert source.positions() == positions

    def test_a_source_that_was_never_read_can_be_closed(self, stream: Open) -> None:
        stream().close()

    def test_only_a_file_ends(self, stream: Open) -> None:
        source = stream()
        rest(source)
        assert source.exhausted == isinstance(source, FileSource)


class TestFileSourceOnRecords(SourceContract):
    @pytest.fixture
    def stream(self) -> Open:
        return lambda: FileSource([(value, BEGAN_MS + n) for n, value in enumerate(VALUES)], chunk=CHUNK)


class TestFileSourceOnAGenerator(SourceContract):
    @pytest.fixture
    def stream(self) -> Open:
        return lambda: FileSource(((value, BEGAN_MS + n) for n, value in enumerate(VALUES)), chunk=CHUNK)

    def test_it_cannot_be_sought_back(self, stream: Open) -> None:
        source = stream()
        polled(source)
        with pytest.raises(SourceError, match="only once"):
            source.seek({})


class TestFileSourceOnAFile(SourceContract):
    @pytest.fixture
    def stream(self, tmp_path: Path) -> Open:
        path = tmp_path / "events.jsonl"
        path.write_bytes(b"\n".join(VALUES) + b"\r\n\n")
        return lambda: FileSource(JsonLines(path), chunk=CHUNK)

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match=r"nothing\.jsonl is no file"):
            JsonLines(tmp_path / "nothing.jsonl")

    def test_a_position_past_the_end_of_the_file_is_an_error(self, stream: Open) -> None:
        source = stream()
        [partition] = source.positions()
        with pytest.raises(SourceError, match="ends before its position 58"):
            source.seek({partition: 58})


@pytest.mark.integration
class TestKafkaSource(SourceContract):
    @pytest.fixture
    def stream(self, broker: Broker, topic: str) -> Iterator[Open]:
        with KafkaProducer(bootstrap_servers=broker.bootstrap_servers) as producer:
            for n, value in enumerate(VALUES):
                producer.send(topic, value, timestamp_ms=BEGAN_MS + n)
            producer.flush()
        settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers, topics=(topic,), max_poll_records=CHUNK)
        opened: list[KafkaSource] = []

        def open_source() -> Source:
            opened.append(KafkaSource(settings))
            return opened[-1]

        yield open_source
        for source in opened:
            source.close()
