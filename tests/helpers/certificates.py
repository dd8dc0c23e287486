"""An authority of one's own and a hub's certificate, made by the very commands of docs/hub.md."""

import subprocess
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "hub.md"
HOST = "hub.example.org"


def commands(first_line: str) -> str:
    """The block of docs/hub.md that begins with this line."""
    for block in DOCS.read_text().split("```bash\n")[1:]:
        text = block.partition("```")[0]
        if text.startswith(first_line):
            return text
    raise AssertionError(f"docs/hub.md has no block that begins with {first_line!r}")


def make_certificates(folder: Path, host: str = HOST) -> tuple[str, str, str]:
    """(authority, certificate, key), PEM files. host: the name, or where it is one the IP address, in the certificate."""
    folder.mkdir(parents=True, exist_ok=True)
    script = commands(f"NAME=DNS:{HOST}")
    kind = "IP" if host[0].isdigit() or ":" in host else "DNS"
    script = script.replace(f"NAME=DNS:{HOST}", f"NAME={kind}:{host}")
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(str(folder / name) for name in ("ca.pem", "hub.pem", "hub.key"))  # type: ignore[return-value]
