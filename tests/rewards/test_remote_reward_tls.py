"""The remote reward over HTTPS: services with certificates that are trusted, unknown, or of another host."""

import shutil
import subprocess
from pathlib import Path

import pytest
from test_remote_reward import Service, ask, ok

from dschat_ppo.rewards.reward_source import RewardServiceError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A folder with an authority, `ca.pem`, and what it signed: `here.pem` for 127.0.0.1 and `other.pem`."""
    folder = tmp_path_factory.mktemp("certificates")
    new_key = ["-newkey", "rsa:2048", "-nodes", "-keyout"]
    authority = ["-days", "2", "-subj", "/CN=authority of the test", "-addext", "keyUsage=critical,keyCertSign"]
    openssl(folder, "req", "-x509", *new_key, "ca.key", "-out", "ca.pem", *authority)
    for name, host in (("here", "IP:127.0.0.1"), ("other", "DNS:elsewhere.invalid")):
        openssl(folder, "req", *new_key, f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text(f"subjectAltName={host}\n")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


@pytest.fixture
def secure(certificates):
    running = []

    def start(name: str) -> Service:
        running.append(Service([ok(1, 2, 3)], (certificates / f"{name}.pem", certificates / f"{name}.key")))
        return running[-1]

    yield start
    for service in running:
        service.server.shutdown()
        service.server.server_close()


def test_a_certificate_of_a_trusted_authority_is_accepted(secure, certificates, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    assert ask(secure("here").url).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "trusted", "cause"),
    [("here", False, "unable to get local issuer certificate"), ("other", True, "IP address mismatch")],
    ids=["unknown authority", "another host"],
)
def test_other_certificates_are_refused_in_one_line(secure, certificates, monkeypatch, name, trusted, cause):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    service = secure(name)
    with pytest.raises(RewardServiceError, match=f"no reply in 1 attempts; the last: .*{cause}") as problem:
        ask(service.url, retries=0)
    assert "\n" not in str(problem.value) and len(str(problem.value)) < 400
    assert service.requests == []  # no text went to it
