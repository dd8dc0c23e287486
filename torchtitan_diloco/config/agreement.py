"""The settings every island of a run must share, compared when an island joins."""

from collections.abc import Iterator
from typing import Any

from torchtitan_diloco.config.fields import get, keys
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.shared import must_agree, must_agree_in_lockstep
from torchtitan_diloco.config.tokenizer import tokenizer_digest


def agreement(config: RunConfig) -> dict[str, Any]:
    """Flat key -> JSON value of all that must be equal on every island of a run; sorted, so its JSON can be hashed.

    The tokenizer counts by content ("model.tokenizer", a SHA-256), since its folder differs from cluster to cluster.

    Raises:
        UserError: the tokenizer is missing.
    """
    values = {key: get(config, key) for key in keys() if must_agree(key)}
    values["model.tokenizer"] = tokenizer_digest(config.model.hf_assets_path)
    return dict(sorted(values.items()))


def lockstep_agreement(config: RunConfig) -> dict[str, Any]:
    """What islands that average their gradients must agree on beside that: flat key -> JSON value."""
    return {
        key: get(config, key) for key in sorted(keys()) if must_agree_in_lockstep(key) and not must_agree(key)
    }


def lockstep_differences(config: RunConfig, other: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, here, there) for each setting that islands which average their gradients must share and these do not."""
    for key in keys():
        if must_agree_in_lockstep(key) and get(config, key) != get(other, key):
            yield key, get(config, key), get(other, key)
