"""What loading a configuration says is wrong with it."""

from pathlib import Path

import pytest

from torchtitan_diloco.config.load import ConfigError, load_config


def problems(folder: Path, text: str, *overrides: str) -> list[str]:
    """One line for each mistake in ``text``, which is written to a file below ``folder`` and called FILE in them."""
    file = folder / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return [problem.replace(str(file), "FILE") for problem in caught.value.problems]
