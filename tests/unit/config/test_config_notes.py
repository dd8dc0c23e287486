"""Settings without an effect are remarked upon; the others are not."""

from pathlib import Path

import pytest

from torchtitan_diloco.config.load import load_config

NO_EFFECT = {
    "feedback of what loses nothing": (
        "[semi_sync.codec]\nerror_feedback = true",
        'semi_sync.codec.error_feedback: has no effect with semi_sync.codec.wire = "fp32", which loses nothing',
    ),
    "rounding of what does not round": (
        '[semi_sync.codec]\nrounding = "stochastic"',
        'semi_sync.codec.rounding: has no effect with semi_sync.codec.wire = "fp32", which does not round',
    ),
    "the end of a schedule that stays": (
        "[semi_sync.outer]\nmin_lr_factor = 0.2",
        'semi_sync.outer.min_lr_factor: has no effect with semi_sync.outer.schedule = "constant"',
    ),
    "two ways to cut": (
        '[semi_sync]\nfragment_by = "layer"\nmodule_fqns_per_fragment = [["layers.0"], ["layers.1"]]',
        "semi_sync.fragment_by: has no effect with semi_sync.module_fqns_per_fragment, which says what the fragments are",
    ),
}


def notes(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return [note for note in load_config(file).notes if note.startswith("semi_sync.")]


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_setting_without_an_effect_is_remarked_upon(name: str, tmp_path: Path) -> None:
    text, note = NO_EFFECT[name]
    assert notes(tmp_path, text) == [note]


def test_the_same_settings_with_an_effect_are_not(tmp_path: Path) -> None:
    text = (
        '[semi_sync]\nfragment_by = "layer"\n'
        '[semi_sync.codec]\nwire = "int8"\nerror_feedback = true\nrounding = "stochastic"\n'
        '[semi_sync.outer]\nschedule = "linear"\nmin_lr_factor = 0.2\n'
    )
    assert notes(tmp_path, text) == []
