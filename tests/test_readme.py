"""The documents tell the truth: what they name exists, what they show runs."""

import ast
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError

import replay.__main__
import worker.__main__
from tests.deployment import ROOT, settings_of
from tests.waiting import eventually
from worker.check import check_redis
from worker.config_view import ENV_FILE_VARIABLE, variables
from worker.events import ITEM_REASONS, Decoder, Reason, Rejected
from worker.file_source import FileRecords
from worker.items import Description, ItemDecoder
from worker.keys import LAYOUT
from worker.publisher import Heartbeat, ItemVectors, Meta, Popular, Publisher, Removed, UserVectors
from worker.redis_client import error_kind
from worker.settings import EventSettings, ItemSettings, PublishSettings, RedisSettings
from worker.source import Partition
from worker.telemetry import Telemetry

PAGES = ["README.md", "docs/operations.md", "CONTRIBUTING.md", "CHANGELOG.md"]
WITH_COMMANDS = [*PAGES, ".env.example", "docker-compose.yml", "docker-compose.gpu.yml", "Dockerfile", "Makefile"]
pages = pytest.mark.parametrize("page", PAGES)
NOW_MS = 1_790_000_000_000
ITEMS = Partition("items", 0)


def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    """The contents of a page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def code_spans(page: str) -> list[str]:
    """What stands in single backticks, outside of code blocks."""
    prose = re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose first heading is this one."""
    lines = text(page).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return table


# ---- settings


def update_readme() -> Any:
    spec = importlib.util.spec_from_file_location("update_readme", ROOT / "docs" / "update_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert update_readme().with_settings(text("README.md")) == text("README.md"), "`make readme` writes it again"


def test_a_table_that_is_out_of_date_is_written_again() -> None:
    with_settings = update_readme().with_settings
    old = text("README.md").replace("| `localhost:9092` |", "| `somewhere:1` |")
    assert old != text("README.md")
    assert with_settings(old) == text("README.md")
    with pytest.raises(ValueError, match="settings"):
        with_settings("no markers")


@pytest.mark.parametrize(
    "page", [*WITH_COMMANDS, "deploy/kubernetes/configmap.yaml", "deploy/kubernetes/deployment.yaml"]
)
def test_every_variable_that_is_named_is_a_setting(page: str) -> None:
    known = {variable.env for variable in variables()} | {ENV_FILE_VARIABLE}
    named = set(re.findall(r"\bFRESHET_\w+", text(page))) - {"FRESHET_"}
    assert named <= known


def test_the_example_settings_work_and_the_active_ones_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    active, all_of_them = assignments(""), assignments("(?:# )?")
    assert active.items() <= all_of_them.items() | active.items()
    assert settings_of(active, monkeypatch) == settings_of({}, monkeypatch)
    changed = settings_of(all_of_them, monkeypatch)
    assert changed.kafka.security_protocol == "SASL_SSL"
    assert changed.redis.url.get_secret_value().startswith("rediss://")


def assignments(before: str) -> dict[str, str]:
    """The variables of .env.example, those that are commented out too if `before` lets them pass."""
    lines = re.findall(rf"^{before}(FRESHET_\w+)=(.*)$", text(".env.example"), re.MULTILINE)
    return {name: value.strip("'") for name, value in lines}


def test_the_example_file_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.config_view import load_settings

    default = settings_of({}, monkeypatch)  # and no variable of ours is left in the environment
    assert load_settings(ROOT / ".env.example") == default


# ---- commands


def commands(page: str) -> Iterator[str]:
    """Every line of the code blocks, comments cut off, every code span; of other files every line."""
    if page.endswith(".md"):
        for block in blocks(page, "sh"):
            yield from (re.sub(r"\s+#.*", "", line) for line in block.splitlines())
        yield from code_spans(page)
    else:
        yield from (re.sub(r"\s{3,}.*", "", line.lstrip("# \t@")) for line in text(page).splitlines())


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_line_is_taken_by_the_real_parser(page: str) -> None:
    parsers = {"worker": worker.__main__._parser(), "replay": replay.__main__._parser()}
    for command in commands(page):
        for module, rest in re.findall(r"\bpython -m (\w+)([^`\"';|]*)", command):
            if module in parsers:
                parsers[module].parse_args(shlex.split(re.sub(r"[.:,]?$", "", rest)))


def test_the_commands_are_found() -> None:
    found = " ".join(commands("README.md"))
    assert "python -m worker --env-file .env check" in found
    assert "python -m replay demo --keep" in found
    with pytest.raises(SystemExit):
        worker.__main__._parser().parse_args(["chekc"])


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_make_target_is_there(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    for command in commands(page):
        if named := re.match(r"(?:[A-Z_]+=\S+ )*make ([a-z-]+)$", command.strip()):
            assert named[1] in targets, command


def test_every_target_that_people_call_is_described() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)
    assert phony
    described = "".join(text(page) for page in (*PAGES, "Makefile"))
    for target in set(phony[1].split()) - {"help", "clean", "lint"}:
        assert f"make {target}" in described


# ---- files and links

RUNTIME = (".freshet/", "reports/", "checkpoint-", ".env", "/")  # made when something runs, or no file of ours


@pages
def test_every_file_that_is_named_exists(page: str) -> None:
    named = [span for span in code_spans(page) if re.fullmatch(r"[\w.-]*[\w-][\w./-]*", span)]
    paths = [span for span in named if "/" in span or re.search(r"\.(py|md|yml|yaml|toml|txt)$", span)]
    for path in paths:
        if not path.startswith(RUNTIME):
            assert (ROOT / path).exists(), path


@pages
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ---- events


def decode(value: bytes, settings: EventSettings | None = None) -> Any:
    return Decoder(settings or EventSettings()).decode([value], [NOW_MS])


def test_every_event_that_is_shown_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [block for block in blocks("README.md", "json") if '"attributes"' not in block]
    assert len(shown) == 3
    mapped = settings_of(shown_settings(), monkeypatch).events
    for block in shown:
        settings = mapped if "context" in block else None
        decoded = decode(block.strip().encode(), settings)
        assert not decoded.rejected
        assert len(decoded) == 1
        assert decoded.users == ["196"]


def shown_settings() -> dict[str, str]:
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    return {
        n: v[0]
        for n, *v in (
            re.match(r"(FRESHET_\w+)='(.*)'$", line).groups() for line in lines if line.startswith("FRESHET_")
        )
    }  # type: ignore[union-attr]


def test_the_settings_that_are_shown_do_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    events = settings_of(shown_settings(), monkeypatch).events
    assert (events.types["skip"].observe, events.types["skip"].weight) == (False, -0.5)
    assert (events.types["click"].observe, events.types["purchase"].weight) == (True, 3)
    assert events.fields["user_id"] == "$.context.uid"


def test_every_reason_for_rejection_is_shown_with_a_record_that_has_it() -> None:
    table = rows("README.md", "value")
    assert [reason.strip("`") for _, reason in table] == [reason for reason in Reason if reason not in ITEM_REASONS]
    for shown, reason in table:
        if shown.startswith("`"):
            (rejected,) = decode(shown.strip("`").encode()).rejected
            assert rejected.reason == reason.strip("`"), shown
    by_words = [reason for shown, reason in table if not shown.startswith("`")]
    assert by_words == ["`too_large`", "`not_utf8`"]


def described(value: str) -> tuple[Description | None, list[Rejected]]:
    decoded = ItemDecoder(EventSettings(), ItemSettings()).decode(FileRecords([(value.encode(), -1)], ITEMS, 0))
    return next((description for _, description in decoded.changes), None), decoded.rejected


def test_the_description_of_an_item_that_is_shown_is_one() -> None:
    (shown,) = [block for block in blocks("README.md", "json") if '"attributes"' in block]
    description, rejected = described(shown)
    assert not rejected
    assert description == Description("Toy Story", b'{"genres":["Animation","Comedy"],"year":1995}', available=True)


def test_every_reason_of_the_items_topic_is_shown_with_a_record_that_has_it() -> None:
    table = rows("README.md", "description")
    for shown, reason in table:
        _, (rejected,) = described(shown.strip("`"))
        assert rejected.reason == reason.strip("`"), shown
    assert {reason.strip("`") for _, reason in table} == {Reason.BAD_ITEM_ID, *ITEM_REASONS}


def test_the_event_types_are_the_defaults() -> None:
    types = EventSettings().types
    assert {name for name, kind in types.items() if kind.observe and kind.weight == 1} == {
        "click",
        "view",
        "purchase",
        "rating",
    }
    assert not types["impression"].observe
    assert types["impression"].weight == 0
    assert types.keys() <= set(code_spans("README.md"))


# ---- Redis


DIM = 4
USERS = ["196", "用户:7", "only {braces}"]
ITEMS = ["242", "a:b", "ü", "302", "clicked"]


@pytest.fixture
def published(redis_client: Redis, redis_url: str) -> Redis:
    """A Redis that the real publisher has written to, under the default prefix."""
    rng = np.random.default_rng(7)
    users, items = (rng.normal(size=(len(ids), DIM)).astype(np.float32) for ids in (USERS, ITEMS))
    meta = Meta(DIM, "two_tower", exact=True, model="m", started_ms=NOW_MS)
    publisher = Publisher(RedisSettings(url=redis_url), PublishSettings(), meta)  # type: ignore[arg-type]
    publisher.start()
    eventually(lambda: publisher.epoch)
    recent = [json.dumps(["clicked"]).encode()] * len(USERS)
    ones = np.ones(len(USERS), np.int64)
    publisher.submit(UserVectors(USERS, users, recent, ones, version=1, updated_ms=NOW_MS))
    known = {"titles": ["A"] * len(ITEMS), "attributes": [b"{}"] * len(ITEMS), "available": [True] * len(ITEMS)}
    publisher.submit(ItemVectors(ITEMS, items, np.ones(len(ITEMS), np.int64), 2, NOW_MS, **known))
    publisher.submit(Popular(["302", "242"], np.array([9.0, 3.0])))
    assert publisher.close(10)
    return redis_client


def best(client: Redis, user: str) -> list[str]:
    """Items by descending dot product, without the clicked one; computed apart from the snippet."""
    vector = np.frombuffer(client.hget(f"rec:user:{user}", "vector"), "<f4")  # type: ignore[arg-type]
    scores = {
        item: float(vector @ np.frombuffer(client.hget(f"rec:item:{item}", "vector"), "<f4"))  # type: ignore[arg-type]
        for item in ITEMS
        if item != "clicked"
    }
    return sorted(scores, key=lambda item: -scores[item])


def look_up(client: Redis) -> Any:
    """The README's Python look-up, over this Redis."""
    (program,) = blocks("README.md", "python")
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(program, "README.md", "exec"), names)  # our own page
    return names["Lookup"](client)


@pytest.mark.integration
def test_the_python_look_up_ranks_by_the_dot_product(published: Redis) -> None:
    found = look_up(published)
    for user in USERS:
        assert found.recommend(user) == best(published, user)
        assert found.recommend(user, 2) == best(published, user)[:2]


@pytest.mark.integration
def test_the_python_look_up_gives_a_stranger_what_is_popular(published: Redis) -> None:
    assert look_up(published).recommend("nobody") == ["302", "242"]
    assert look_up(published).recommend("nobody", 1) == ["302"]


@pytest.mark.integration
def test_the_python_look_up_skips_vectors_of_another_length(published: Redis) -> None:
    published.hset("rec:item:242", "vector", b"1234")
    published.hset("rec:user:196", "vector", b"1234")
    found = look_up(published)
    assert "242" not in found.recommend("用户:7")
    assert found.recommend("196") == ["302", "242"]


@pytest.mark.integration
def test_the_python_look_up_refuses_another_layout(published: Redis) -> None:
    published.hset("rec:meta", "layout", LAYOUT + 1)
    with pytest.raises(RuntimeError, match="another layout"):
        look_up(published)


@pytest.mark.integration
def test_the_fields_that_are_listed_are_those_that_are_published(published: Redis) -> None:
    listed = {key: set(re.findall(r"`(\w+)`", cells)) for key, _, cells in rows("README.md", "key")}
    for key in ("meta", "user:<id>", "item:<id>"):
        real = key.replace("<id>", USERS[0] if "user" in key else ITEMS[0])
        there = {name.decode() for name in published.hgetall(f"rec:{real}")}
        assert there <= listed[f"`rec:{key}`"], "every field is listed"
        assert listed[f"`rec:{key}`"] - there <= {"float32le", "dot", "dim"}, "every listed field is there"


def test_every_language_has_a_look_up_that_checks_the_layout_and_the_length() -> None:
    for language, length in (
        ("python", "!= 4 * self.dim"),
        ("go", "!= 4*dim"),
        ("java", "!= 4 * dim"),
        ("javascript", "!== 4 * dim"),
    ):
        (program,) = blocks("README.md", language)
        assert length in program
        assert "float32le" in program
        assert "recent" in program
        assert ":popular" in program


# ---- operations


def test_every_metric_is_described_and_nothing_else() -> None:
    registered = {
        f"{metric.name}_total"
        if metric.type == "counter"
        else f"{metric.name}_info"
        if metric.type == "info"
        else metric.name
        for metric in Telemetry().registry.collect()
    }
    described = {name for first, *_ in rows("docs/operations.md", "metric") for name in re.findall(r"`(\w+)`", first)}
    assert described == registered
    everywhere = {n for page in PAGES for n in re.findall(r"\bfreshet_[a-z_]+", text(page))}
    assert {name.removesuffix("_bucket") for name in everywhere} <= registered


def test_every_readiness_reason_is_explained() -> None:
    tree = ast.parse((ROOT / "worker" / "report.py").read_text())
    (function,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_reasons")
    (given,) = (n for n in ast.walk(function) if isinstance(n, ast.Return))
    assert isinstance(given.value, ast.Dict)
    reasons = {key.value for key in given.value.keys if isinstance(key, ast.Constant)}
    explained = [first.strip("`") for first, *_ in rows("docs/operations.md", "reason")]
    assert set(explained) == reasons | {"loop"}


def test_every_kind_of_redis_error_is_explained() -> None:
    import worker.redis_client as module

    kinds = {word for _, word in module._KINDS} | {error_kind(ValueError("x")), error_kind(module.ResponseError("x"))}
    kinds.add(error_kind(module.ResponseError("MISCONF x")))
    explained = {kind for first, *_ in rows("docs/operations.md", "kind") for kind in re.findall(r"`(\w+)`", first)}
    assert explained == kinds


def test_every_log_line_that_is_named_is_written_somewhere() -> None:
    source = "".join(path.read_text() for path in (ROOT / "worker").glob("*.py"))
    named = re.findall(
        r"(?:log lines?|logs|a line) `(\w+)`(?: and `(\w+)`)?", text("docs/operations.md"), re.IGNORECASE
    )
    events = {event for pair in named for event in pair if event}
    assert len(events) >= 8
    for event in events:
        assert f'"{event}"' in source, event


def test_the_settings_that_are_fixed_are_those_that_the_worker_refuses_to_change() -> None:
    from worker import checkpoint

    (section,) = re.findall(r"### Change settings\n(.*?)###", text("docs/operations.md"), re.DOTALL)
    listed = re.findall(r"FRESHET_MODEL__(\w+)", section)
    assert [name.lower() for name in listed] == list(checkpoint.SHAPING)


@pytest.fixture
def users_of_redis(published: Redis) -> Iterator[Redis]:
    """The users that the page names, for as long as a test takes."""
    rules = re.findall(r"^ *ACL (SETUSER .+)$", text("docs/operations.md"), re.MULTILINE)
    assert len(rules) == 2
    for rule in rules:
        published.execute_command("ACL", *rule.split())
    yield published
    published.acl_deluser("freshet", "readers")


@pytest.mark.integration
def test_the_readers_may_look_up_and_nothing_else(users_of_redis: Redis, redis_url: str) -> None:
    with Redis.from_url(redis_url, username="readers", password="password") as client:
        found = look_up(client)
        assert found.recommend("196") == best(users_of_redis, "196")
        assert found.recommend("nobody") == ["302", "242"]
        for command in (
            ["HSET", "rec:user:196", "vector", "x"],
            ["HGETALL", "other:meta"],
            ["FLUSHALL"],
            ["KEYS", "*"],
        ):
            with pytest.raises(NoPermissionError):
                client.execute_command(*command)


@pytest.mark.integration
def test_the_worker_s_user_may_do_all_that_a_worker_does(
    users_of_redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = redis_url.replace("://", "://freshet:password@")
    settings = RedisSettings(url=url, ttl_s=3600)  # type: ignore[arg-type]
    meta = Meta(DIM, "two_tower", exact=True, model="m", started_ms=NOW_MS)
    publisher = Publisher(settings, PublishSettings(), meta)
    publisher.start()
    eventually(lambda: publisher.epoch)
    publisher.submit(UserVectors(["new"], np.ones((1, DIM), np.float32), [b"[]"], np.ones(1, np.int64), 1, NOW_MS))
    publisher.submit(Removed(["196"], [], version=2))
    publisher.submit(Popular(["242"], np.array([1.0])))
    publisher.submit(Heartbeat({"state": "running"}))
    eventually(lambda: len(publisher.acknowledged()) or publisher.backlog == 0)
    publisher.sweep()
    eventually(lambda: not publisher.sweeping)
    assert publisher.close(10)
    assert publisher.problem is None
    keys = set(users_of_redis.scan_iter("rec:user:*"))
    assert keys == {b"rec:user:new"}, "the others were removed, or swept: an older worker wrote them"
    whole = settings_of({"FRESHET_REDIS__URL": url}, monkeypatch)
    assert {finding.status for finding in check_redis(whole)} <= {"ok", "warn"}
