"""Kafka over TLS, with SASL and with rights: who gets in, who is told why not, and what is never shown."""

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from urllib.parse import quote

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.admin import (
    ACL,
    ACLFilter,
    ACLOperation,
    ACLPermissionType,
    ResourcePattern,
    ResourceType,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from replay.local_stack import KafkaBroker, create_topic, free_port
from tests.certificates import Authority
from tests.clicks import MakeWorker, clicks, send_all
from tests.faults.own_kafka import admin, assert_learned, committed, complaints, saved_position
from tests.waiting import eventually
from tests.worker_process import WorkerProcess

pytestmark = [pytest.mark.faults, pytest.mark.integration, pytest.mark.apache_kafka]
SLOW = pytest.mark.slow

# Characters that Kafka, JSON, Python and URLs each write in another way.
SECRET = "s3cr\u00e9t \\ \" ' w\u00f6rd/@:%=,"
PLAIN_SECRET = "plain-s3cret-w0rd/@:%"  # Kafka's JAAS file knows no quotes inside
KEY_SECRET = "key-s3cr\u00e9t"
_topics = count()


class SecureBroker(KafkaBroker):
    """Beside PLAINTEXT, for the test itself, it listens with TLS, with TLS both ways, and with SASL over TLS."""

    def __init__(self, data_dir: Path, authority: Authority) -> None:
        super().__init__(data_dir)
        self.authority, self._certificate = authority, authority.issue("broker", hosts=("127.0.0.1",))
        self.ssl_port, self.mutual_port, self.sasl_port = free_port(), free_port(), free_port()

    def properties(self) -> dict[str, str]:
        properties = super().properties()
        ports = {"SSL": self.ssl_port, "MUTUAL": self.mutual_port, "SASL_SSL": self.sasl_port}
        properties["listeners"] += "".join(f",{name}://127.0.0.1:{port}" for name, port in ports.items())
        properties["listener.security.protocol.map"] += ",MUTUAL:SSL"
        module = "org.apache.kafka.common.security"
        return properties | {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _one_line(self._certificate.certificate),
            "ssl.keystore.key": _one_line(self._certificate.key),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": _one_line(self.authority.cafile),
            "listener.name.mutual.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required "
            f'user_reader="{PLAIN_SECRET}";',
            "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
            "listener.name.sasl_ssl.connections.max.reauth.ms": "2000",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
            "super.users": "User:ANONYMOUS",
        }


def _one_line(pem: Path) -> str:
    return pem.read_text().replace("\n", "\\n")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with SecureBroker(tmp_path_factory.mktemp("secure-kafka"), authority) as broker:
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            alter(broker.bootstrap_servers, UserScramCredentialUpsertion("reader", mechanism, SECRET))
        yield broker


def alter(servers: str, credential: UserScramCredentialUpsertion | UserScramCredentialDeletion) -> None:
    """Give a user a password, or take it away."""
    with admin(servers) as client:
        assert client.alter_user_scram_credentials([credential]) == {credential.user: None}


@pytest.fixture
def user(secure: SecureBroker) -> str:
    """Somebody with a password and with rights that the test may take away."""
    name = f"user-{next(_topics)}"
    alter(secure.bootstrap_servers, UserScramCredentialUpsertion(name, ScramMechanism.SCRAM_SHA_512, SECRET))
    return name


@pytest.fixture
def servers(secure: SecureBroker) -> str:
    """Of the PLAINTEXT listener, where the test may do everything."""
    return secure.bootstrap_servers


@pytest.fixture
def own_topic(servers: str) -> str:
    name = f"secure-{next(_topics)}"
    create_topic(servers, name)
    return name


@pytest.fixture
def tls(secure: SecureBroker) -> dict[str, object]:
    """Settings of a client that knows the authority."""
    return {"kafka__security_protocol": "SSL", "kafka__ssl_cafile": secure.authority.cafile}


@pytest.fixture
def scram(tls: dict[str, object]) -> dict[str, object]:
    """Settings of a client that is let in by SCRAM."""
    sasl = {"kafka__security_protocol": "SASL_SSL", "kafka__sasl_mechanism": "SCRAM-SHA-512"}
    return tls | sasl | {"kafka__sasl_username": "reader", "kafka__sasl_password": SECRET}


@pytest.fixture
def make(make_worker: MakeWorker, own_topic: str) -> MakeWorker:
    """Makes workers on `own_topic` that talk to one port of the secure broker; they log all there is."""

    def make(port: int, **settings: object) -> WorkerProcess:
        quick = {"kafka__metadata_max_age_ms": 500, "log__level": "debug"}
        return make_worker(topic=own_topic, bootstrap_servers=f"127.0.0.1:{port}", **quick | settings)

    return make


def assert_learns(worker: WorkerProcess, servers: str, topic: str) -> None:
    """It is let in, reads, commits, and writes what it rejects."""
    values, users, items = clicks(300)
    create_topic(servers, f"{topic}.dead-letter")
    send_all(servers, topic, [*values, b"\xff{"])
    worker.start().wait_read(301)
    worker.wait_ready()
    eventually(lambda: ends(servers, f"{topic}.dead-letter") == 1, 60, worker.describe)
    assert worker.stop() == 0
    assert_learned(worker, users, items)
    assert committed(servers, topic) == saved_position(worker, topic) == 301


def ends(servers: str, topic: str) -> int:
    """The end of partition 0."""
    consumer = KafkaConsumer(bootstrap_servers=servers)
    try:
        return int(consumer.end_offsets([TopicPartition(topic, 0)])[TopicPartition(topic, 0)])
    finally:
        consumer.close()


def told_once(worker: WorkerProcess, *parts: str) -> str:
    """Wait until the log says why Kafka cannot be reached, in one line; the worker stays up, and not ready."""
    eventually(lambda: worker.logged("kafka_out_of_reach"), 60, worker.describe)
    eventually(lambda: "out of reach" in worker.reasons().get("kafka", ""), 60, worker.describe)
    assert worker.get("/healthz")[0] == 200
    error = str(worker.logged("kafka_out_of_reach")[0]["error"])
    assert "\n" not in error
    for part in parts:
        assert re.search(part, error), error
    return error


def assert_secret(worker: WorkerProcess, secret: str, *others: str) -> None:
    """In nothing that the worker, its commands and `others` have shown, in no way that a password is written."""
    forms = {
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
        repr(secret.encode())[2:-1],
        json.dumps(repr(secret.encode())[2:-1])[1:-1],
        quote(secret, safe=""),
        base64.b64encode(secret.encode()).decode(),
    }
    shown = [worker.log, *(command(worker, name) for name in ("config", "check")), *others]
    assert "FRESHET_KAFKA__SASL_PASSWORD" in shown[1]
    for text in shown:
        assert [form for form in forms if form in text] == []
    for saved in worker.checkpoints():
        assert secret.encode() not in saved.path.read_bytes()


def command(worker: WorkerProcess, name: str) -> str:
    """Everything that `python -m worker NAME` prints under the worker's settings."""
    return run("worker", name, settings=worker.settings)[1]


def run(module: str, *arguments: str, settings: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and everything printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=inherited | settings, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


# Let in.


def test_a_topic_is_read_over_tls(
    make: MakeWorker, secure: SecureBroker, own_topic: str, tls: dict[str, object]
) -> None:
    """The broker shows a certificate of an authority that only the settings name."""
    assert_learns(make(secure.ssl_port, **tls), secure.bootstrap_servers, own_topic)


def test_a_topic_is_read_by_a_client_that_shows_a_certificate(
    make: MakeWorker, secure: SecureBroker, own_topic: str, tls: dict[str, object]
) -> None:
    """TLS both ways; the client's key is encrypted."""
    mine = secure.authority.issue("client", password=KEY_SECRET)
    shown = {"kafka__ssl_certfile": mine.certificate, "kafka__ssl_keyfile": mine.key, "kafka__ssl_password": KEY_SECRET}
    worker = make(secure.mutual_port, **tls | shown)
    assert_learns(worker, secure.bootstrap_servers, own_topic)
    assert_secret(worker, KEY_SECRET)


@pytest.mark.parametrize("mechanism", ["PLAIN", pytest.param("SCRAM-SHA-256", marks=SLOW), "SCRAM-SHA-512"])
def test_a_topic_is_read_by_a_user_with_a_password(
    make: MakeWorker, secure: SecureBroker, own_topic: str, scram: dict[str, object], mechanism: str
) -> None:
    """SASL over TLS; a session lasts two seconds only and is renewed."""
    password = PLAIN_SECRET if mechanism == "PLAIN" else SECRET
    sasl = {"kafka__sasl_mechanism": mechanism, "kafka__sasl_password": password}
    worker = make(secure.sasl_port, **scram | sasl)
    assert_learns(worker, secure.bootstrap_servers, own_topic)
    assert_secret(worker, password)


# Kept out, and told why.


def test_a_broker_of_an_unknown_authority_is_told_in_one_line(
    make: MakeWorker, secure: SecureBroker, tls: dict[str, object], tmp_path: Path
) -> None:
    """The certificate proves nothing to the worker: no byte of an event is read, and no storm is in the log."""
    another = Authority(tmp_path / "another")
    worker = make(secure.ssl_port, **tls | {"kafka__ssl_cafile": another.cafile, "log__level": "info"}).start()
    told_once(worker, "CERTIFICATE_VERIFY_FAILED")
    assert len(complaints(worker)) <= 3, complaints(worker)
    assert "CERTIFICATE_VERIFY_FAILED" in command(worker, "check")
    assert worker.stop() == 0


@SLOW
def test_a_broker_under_another_name_than_its_certificates_is_told_unless_names_do_not_matter(
    make: MakeWorker, secure: SecureBroker, own_topic: str, tls: dict[str, object]
) -> None:
    """The certificate is for 127.0.0.1, the settings say localhost."""
    by_name = {"kafka__bootstrap_servers": f"localhost:{secure.ssl_port}"}
    worker = make(secure.ssl_port, **tls | by_name).start()
    told_once(worker, "CERTIFICATE_VERIFY_FAILED.*[Hh]ostname mismatch")
    assert worker.stop() == 0
    worker = make(secure.ssl_port, **tls | by_name | {"kafka__ssl_check_hostname": "false"})
    assert_learns(worker, secure.bootstrap_servers, own_topic)


@pytest.mark.parametrize(
    ("port", "settings", "told"),
    [
        pytest.param("ssl_port", {}, "", marks=SLOW),
        pytest.param("port", {"kafka__security_protocol": "SSL"}, "SSL", marks=SLOW),
        ("mutual_port", {"kafka__security_protocol": "SSL"}, "SSL.*certificate|certificate.*SSL|disconnected"),
    ],
    ids=["without TLS where there is TLS", "with TLS where there is none", "without the certificate that is wanted"],
)
def test_a_wrong_way_of_speaking_is_an_outage_like_others(
    make: MakeWorker, secure: SecureBroker, port: str, settings: dict[str, str], told: str
) -> None:
    """Neither a crash nor a storm: the worker waits, and says what happened."""
    trusted = {"kafka__ssl_cafile": secure.authority.cafile, "log__level": "info"}
    worker = make(getattr(secure, port), **trusted | settings).start()
    told_once(worker, told)
    assert len(complaints(worker)) <= 3, complaints(worker)
    assert worker.stop() == 0


@pytest.mark.parametrize("mechanism", [pytest.param("PLAIN", marks=SLOW), "SCRAM-SHA-512"])
def test_a_wrong_password_is_told_in_one_line_and_shown_nowhere(
    make: MakeWorker, secure: SecureBroker, scram: dict[str, object], mechanism: str
) -> None:
    """Not ready, alive; neither the commands show it nor the log, at its loudest."""
    secret = "wr0ng-" + SECRET
    wrong = {"kafka__sasl_mechanism": mechanism, "kafka__sasl_password": secret}
    worker = make(secure.sasl_port, **scram | wrong).start()
    told_once(worker, "Authentication failed|during the authentication")
    shown = [worker.get(path)[1] for path in ("/metrics", "/readyz", "/healthz")]
    assert worker.stop() == 0
    ours = [line for line in complaints(worker) if str(line["logger"]).startswith("worker.")]
    assert len(ours) <= 3, ours
    assert "kafka.net.transport" in worker.log  # it was loud
    assert "SaslAuthenticate" not in worker.log
    assert_secret(worker, secret, *shown)
    assert re.search(r"FAIL +kafka .*(Authentication failed|during the authentication)", command(worker, "check"))


@SLOW
def test_a_password_that_is_taken_away_and_given_back_is_an_outage_like_others(
    make: MakeWorker, secure: SecureBroker, servers: str, own_topic: str, scram: dict[str, object], user: str
) -> None:
    """The session cannot be renewed; with the password back, reading goes on. Nothing is lost, nothing doubled."""
    values, users, items = clicks(300)
    mechanism = ScramMechanism.SCRAM_SHA_512
    worker = make(secure.sasl_port, **scram | {"kafka__sasl_username": user, "log__level": "info"}).start().wait_ready()
    send_all(servers, own_topic, values[:200])
    worker.wait_read(200)
    alter(servers, UserScramCredentialDeletion(user, mechanism))
    eventually(lambda: "out of reach" in worker.reasons().get("kafka", ""), 90, worker.describe)
    send_all(servers, own_topic, values[200:])
    eventually(lambda: worker.logged("kafka_out_of_reach"), 90, worker.describe)
    assert worker.get("/healthz")[0] == 200
    assert len(complaints(worker)) <= 10, complaints(worker)
    alter(servers, UserScramCredentialUpsertion(user, mechanism, SECRET))
    worker.wait_read(300)
    worker.wait_ready()
    assert worker.stop() == 0
    assert_learned(worker, users, items)


# Rights.


def rights(user: str, kind: ResourceType, name: str, **permissions: ACLPermissionType) -> list[ACL]:
    resource = ResourcePattern(kind, name)
    return [ACL(f"User:{user}", "*", ACLOperation[op], how, resource) for op, how in permissions.items()]


def grant(servers: str, *wanted: ACL) -> None:
    """Exactly these on the resources that they name."""
    with admin(servers) as client:
        everything = [
            ACLFilter(None, None, ACLOperation.ANY, ACLPermissionType.ANY, acl.resource_pattern) for acl in wanted
        ]
        client.delete_acls(everything)
        assert client.create_acls(list(wanted))["failed"] == []


ALLOW, DENY = ACLPermissionType.ALLOW, ACLPermissionType.DENY


@SLOW
def test_a_right_to_read_that_is_taken_away_and_given_back_loses_nothing(
    make: MakeWorker, secure: SecureBroker, servers: str, own_topic: str, scram: dict[str, object], user: str
) -> None:
    """Again and again, the topic still being seen or not: not ready, the reason is told, no partition is given up."""
    values, users, items = clicks(500)
    topic = ResourceType.TOPIC, own_topic
    grant(servers, *rights(user, *topic, READ=ALLOW))
    worker = make(secure.sasl_port, **scram | {"kafka__sasl_username": user, "log__level": "info"}).start().wait_ready()
    send_all(servers, own_topic, values[:100])
    worker.wait_read(100)
    for sent, seen in ((200, ALLOW), (300, ALLOW), (400, DENY), (500, DENY)):
        grant(servers, *rights(user, *topic, READ=DENY, DESCRIBE=seen))
        eventually(lambda: "kafka" in worker.reasons(), 60, worker.describe)
        send_all(servers, own_topic, values[sent - 100 : sent])
        assert worker.get("/healthz")[0] == 200
        grant(servers, *rights(user, *topic, READ=ALLOW))
        worker.wait_read(sent)
        worker.wait_ready()
    assert "TopicAuthorizationFailedError" in json.dumps(complaints(worker))
    assert len(complaints(worker)) <= 15, complaints(worker)
    assert worker.logged("partition_stopped") == worker.logged("gap") == []
    assert worker.stop() == 0
    assert_learned(worker, users, items)


@SLOW
def test_without_the_right_to_write_dead_letters_or_to_commit_learning_goes_on(
    make: MakeWorker, secure: SecureBroker, servers: str, own_topic: str, scram: dict[str, object], user: str
) -> None:
    """Both are told and tried again: with the rights, what waits is written, and the newest positions are committed."""
    values, users, items = clicks(400)
    letters = f"{own_topic}.dead-letter"
    create_topic(servers, letters)
    letter_topic, group = (ResourceType.TOPIC, letters), (ResourceType.GROUP, f"group-{user}")
    grant(servers, *rights(user, *letter_topic, WRITE=DENY), *rights(user, *group, READ=DENY))
    mine = {"kafka__sasl_username": user, "kafka__group_id": f"group-{user}", "log__level": "info"}
    worker = make(secure.sasl_port, **scram | mine, checkpoint__every_events=200).start().wait_ready()
    send_all(servers, own_topic, [*values[:200], b"no json"])
    worker.wait_read(201)
    eventually(lambda: saved_position(worker, own_topic) == 201, 60, worker.describe)
    for event in ("dead_letters_not_written", "kafka_offsets_failed"):
        eventually(lambda event=event: "Authorization" in json.dumps(worker.logged(event)), 60, worker.describe)
    assert worker.get("/readyz")[0] == 200
    assert len(complaints(worker)) <= 10, complaints(worker)
    assert committed(servers, own_topic, group=f"group-{user}") is None
    grant(servers, *rights(user, *letter_topic, WRITE=ALLOW), *rights(user, *group, READ=ALLOW))
    eventually(lambda: ends(servers, letters) == 1, 60, worker.describe)
    eventually(lambda: committed(servers, own_topic, group=f"group-{user}") == 201, 60, worker.describe)
    send_all(servers, own_topic, values[200:])
    worker.wait_read(401)
    assert worker.stop() == 0
    assert_learned(worker, users, items)


# The producer.


@SLOW
def test_replay_is_let_in_by_the_same_settings_and_shows_no_password(
    make: MakeWorker, secure: SecureBroker, servers: str, own_topic: str, scram: dict[str, object]
) -> None:
    """SCRAM over TLS; a wrong password and an unknown authority are one line each."""
    settings = make(secure.sasl_port, **scram).settings
    replay = "synthetic", "--events", "200", "--items", "50", "--users", "20"
    code, shown = run("replay", *replay, settings=settings)
    assert (code, ends(servers, own_topic)) == (0, 200), shown
    for wrong in ({"SASL_PASSWORD": "wr0ng-" + SECRET}, {"SSL_CAFILE": ""}):
        refused = settings | {f"FRESHET_KAFKA__{name}": value for name, value in wrong.items()}
        code, told = run("replay", *replay, settings=refused)
        assert code == 1
        assert re.fullmatch(r"replay: Kafka at \S+ cannot be reached, or does not let us in, within 10 s\n", told), told
        shown += told
    code, loud = run("replay", *replay, "--verbose", settings=settings)
    assert code == 0
    assert SECRET not in shown + loud
    assert repr(SECRET.encode())[2:-1] not in loud
    assert ends(servers, own_topic) == 400
