"""Every mistake in a configuration is reported, all at once, with its place and the remedy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.helpers.light_cli import validate
from tests.helpers.mistakes import problems
from torchtitan_diloco.config.load import ConfigError, load_config
from torchtitan_diloco.config.retired import HARMLESS, RETIRED

ONE_MISTAKE = {
    "typo in a key": (
        "[semi_sync]\nsync_evry = 3",
        "FILE:2: semi_sync.sync_evry: unknown key; did you mean semi_sync.sync_every?",
    ),
    "typo in a key of a nested table": (
        "[semi_sync.outer]\nmomentun = 0.5",
        "FILE:2: semi_sync.outer.momentun: unknown key; did you mean semi_sync.outer.momentum?",
    ),
    "more fragments than steps": (
        "[semi_sync]\nfragments = 9\nsync_every = 8",
        "FILE:2: semi_sync.fragments: (9 fragments) must be at most semi_sync.sync_every (8), in which each is sent once",
    ),
    "more fragments than steps beside an empty list of lists": (
        "[semi_sync]\nmodule_fqns_per_fragment = []\nfragments = 200\nsync_every = 4",
        "FILE:3: semi_sync.fragments: (200 fragments) must be at most semi_sync.sync_every (4)",
    ),
    "overlap as long as the window": (
        "[semi_sync]\nsync_every = 8\noverlap = 8",
        "FILE:3: semi_sync.overlap: (8) must be less than semi_sync.sync_every (8): a fragment is applied before it is sent "
        "again",
    ),
    "workers of two kinds": (
        '[syncer]\nworkers = 2\nworker_urls = ["http://a:1"]\nworker_secret = "secret"',
        "FILE:2: syncer.workers: (2) are processes that the hub starts itself, syncer.worker_urls those that it finds",
    ),
    "workers and spools": (
        '[syncer]\nworkers = 2\nspools = ["spool"]',
        "FILE:3: syncer.spools: cannot be had with workers, which islands have to dial; remove syncer.workers and",
    ),
    "workers that anybody may use": (
        '[syncer]\nworker_urls = ["http://a:1"]',
        "FILE:2: syncer.worker_secret: must name a file where there are syncer.worker_urls, or strangers could use those",
    ),
    "workers to whom tokens go in the clear": (
        '[syncer]\ncert = "c.pem"\nworker_secret = "s"\nworker_urls = ["http://a:1"]',
        "FILE:4: syncer.worker_urls: must all begin with https where the hub has a certificate (syncer.cert)",
    ),
    "fewer workers than none": (
        "[syncer]\nworkers = -1",
        "FILE:2: syncer.workers: must be from 0 to 64, got -1",
    ),
    "mixing without the anchor": (
        "[semi_sync]\nmix_alpha = 1.0",
        "FILE:2: semi_sync.mix_alpha: must be at least 0 and less than 1, got 1.0",
    ),
    "hyphen for underscore": (
        "[training]\nlocal-batch-size = 4",
        "FILE:2: training.local-batch-size: unknown key; did you mean training.local_batch_size?",
    ),
    "key of another section": (
        "[training]\nwarmup_steps = 3",
        "FILE:2: training.warmup_steps: unknown key; did you mean lr_scheduler.warmup_steps?",
    ),
    "key of two other sections": (
        "[training]\n\nlr = 3.0",
        "FILE:3: training.lr: unknown key; did you mean optimizer.lr or semi_sync.outer.lr?",
    ),
    "key of a sub-table": (
        "[semi_sync]\nnesterov = true",
        "FILE:2: semi_sync.nesterov: unknown key; did you mean semi_sync.outer.nesterov?",
    ),
    "key unlike any other": (
        "[transport]\nzzzzz = 1",
        "FILE:2: transport.zzzzz: unknown key; [transport] has: kind, exchange_timeout_s",
    ),
    "key outside of every section": (
        "sync_every = 3\n",
        "FILE:1: sync_every: unknown key; did you mean semi_sync.sync_every?",
    ),
    "typo in a section": (
        "[trainign]\nsteps = 3",
        "FILE:1: trainign: unknown section; did you mean [training]?",
    ),
    "sub-table at the top": (
        "[outer]\nlr = 1",
        "FILE:1: outer: unknown section; did you mean [semi_sync.outer]?",
    ),
    "typo in a sub-table": (
        "[semi_sync.otuer]\nlr = 1",
        "FILE:1: semi_sync.otuer: unknown section; did you mean [semi_sync.outer]?",
    ),
    "typo in an array of tables": (
        "[[data.source]]\npath = 'x'",
        "FILE:1: data.source: unknown section; did you mean [[data.sources]]?",
    ),
    "string for an integer": (
        '[training]\nsteps = "64"',
        'FILE:2: training.steps: must be an integer, got a string ("64"); write 64 without quotes',
    ),
    "words for an integer": (
        '[training]\nsteps = "many"',
        'FILE:2: training.steps: must be an integer, got a string ("many")',
    ),
    "boolean for an integer": (
        "[training]\nsteps = true",
        "FILE:2: training.steps: must be an integer, got a boolean (true)",
    ),
    "boolean for a number": (
        "[optimizer]\nlr = false",
        "FILE:2: optimizer.lr: must be a number, got a boolean (false)",
    ),
    "integer for a boolean": (
        "[checkpoint]\nenable = 1",
        "FILE:2: checkpoint.enable: must be true or false, got an integer (1)",
    ),
    "string for a boolean": (
        '[checkpoint]\nenable = "true"',
        'FILE:2: checkpoint.enable: must be true or false, got a string ("true"); write true without quotes',
    ),
    "float for an integer": (
        "[training]\nsteps = 1e3",
        "FILE:2: training.steps: must be an integer, got a float (1000.0)",
    ),
    "number for a string": ("[model]\nname = 3", "FILE:2: model.name: must be a string, got an integer (3)"),
    "string for a list": (
        '[compile]\ncomponents = "model"',
        'FILE:2: compile.components: must be an array, got a string ("model")',
    ),
    "wrong item in a list": (
        '[compile]\ncomponents = ["model",\n 3]',
        "FILE:2: compile.components: item 2 must be a string, got an integer (3)",
    ),
    "table for a value": ("[optimizer.lr]\nx = 1", "FILE:1: optimizer.lr: must be a number, got a table"),
    "date for a value": (
        "[training]\nsteps = 1979-05-27 07:32:00",
        "FILE:2: training.steps: must be an integer, got a date or time",
    ),
    "value for a table": (
        "training = 3",
        "FILE:1: training: must be a table, written [training], got an integer (3)",
    ),
    "value for an array of tables": (
        '[data]\nsources = "x"',
        'FILE:2: data.sources: must be an array of tables, written [[data.sources]], got a string ("x")',
    ),
    "not a number": ("[optimizer]\nlr = nan", "FILE:2: optimizer.lr: must be a finite number, got nan"),
    "infinite": ("[optimizer]\nlr = inf", "FILE:2: optimizer.lr: must be a finite number, got inf"),
    "huge integer": (f"[debug]\nseed = {1 << 63}", "FILE:2: debug.seed: must fit in 64 bits"),
    "wrong choice": (
        '[semi_sync.merge]\nweight = "token"',
        'FILE:2: semi_sync.merge.weight: must be "tokens", "steps" or "equal", got "token"; did you mean "tokens"?',
    ),
    "range, integer": (
        "[semi_sync]\nsync_every = 0",
        "FILE:2: semi_sync.sync_every: must be at least 1, got 0",
    ),
    "range, number": (
        "[semi_sync]\nouter.momentum = 1",
        "FILE:2: semi_sync.outer.momentum: must be at least 0 and less than 1, got 1.0",
    ),
    "range with an exception": (
        "[checkpoint]\nkeep_latest_k = 1",
        "FILE:2: checkpoint.keep_latest_k: must be at least 2 or 0, got 1",
    ),
    "no list of shards": (
        '[[data.sources]]\npath = "p"\npresent = "0-3;5"',
        'FILE:3: data.sources[0].present: must be ranges of shards such as "0-31,40", or "" for all, got "0-3;5"',
    ),
    "shards beyond the last": (
        '[data]\nshards = 32\n[[data.sources]]\npath = "p"\npresent = "0-32"',
        'FILE:5: data.sources[0].present: ("0-32") names shard 32, and data.shards = 32 are numbered from 0 to 31',
    ),
    "a group of nobody, under its old name": (
        "[fault_tolerance]\nenable = true\ngroup_size = 0",
        "FILE:3: semi_sync.num_islands, written as fault_tolerance.group_size: must be at least 1, got 0",
    ),
    "empty name of a registry": (
        '[transport]\nkind = " "',
        'FILE:2: transport.kind: must be "gloo", "memory", "hub", "spool" or a name that an installed package registers, '
        'got " "',
    ),
    "name that is a path": (
        '[job]\nname = "a/b"',
        "FILE:2: job.name: must be a plain name, not a path, of at most 200 bytes",
    ),
    "blank name": ('[job]\nname = " "', "FILE:2: job.name: must be a plain name"),
    "name with a bell": ('[job]\nname = "a\\u0007"', "FILE:2: job.name: must be a plain name"),
    "name too long for a folder": (
        '[job]\nname = "' + "\u00e4" * 101 + '"',
        "FILE:2: job.name: must be a plain name, not a path, of at most 200 bytes",
    ),
    "port beyond the last": (
        '[lighthouse]\naddress = "http://h:65536"',
        "FILE:2: lighthouse.address: must be an address such as http://host:port, with a port from 1 to 65535 and without "
        "user or password, got",
    ),
    "fewer shards than islands": (
        "[data]\nshards = 1\nsources = [{path = 'a'}]\n[semi_sync]\nnum_islands = 2",
        "FILE:2: data.shards: (1) must be at least semi_sync.num_islands (2), which share them out",
    ),
    "a corpus twice": (
        "[[data.sources]]\npath = 'a'\n[[data.sources]]\npath = 'a'",
        'FILE:4: data.sources[1].path: ("a") is already that of data.sources[0]; remove one of them',
    ),
    **{
        f"a corpus twice, the second time as {again}": (
            f"[[data.sources]]\npath = 'a'\n[[data.sources]]\npath = '{again}'",
            f'FILE:4: data.sources[1].path: ("{again}") is already that of data.sources[0] ("a"), written differently; '
            "remove one of them",
        )
        for again in ("./a", "a/", "a/../a", ".//a/.")
    },
    "both files of a Megatron corpus": (
        "[[data.sources]]\npath = 'a.bin'\n[[data.sources]]\npath = './a.idx'",
        'FILE:4: data.sources[1].path: ("./a.idx") is already that of data.sources[0] ("a.bin"), written differently; '
        "remove one of them",
    ),
    "a data set that TorchTitan does not have": (
        "[training]\ndataset = 'c5'",
        'FILE:2: training.dataset: ("c5") is no data set of TorchTitan 0.3, which has c4, c4_test, c4_validation; prepare',
    ),
    "one to validate on": (
        "[validation]\nenable = true\ndataset = 'c5'",
        'FILE:3: validation.dataset: ("c5") is no data set of TorchTitan 0.3',
    ),
    "nothing that is compiled": (
        "[compile]\ncomponents = ['modle']",
        'FILE:2: compile.components: item 1 must be "model" or "loss", got "modle"; did you mean "model"?',
    ),
    "pipeline schedule": (
        "[parallelism]\npipeline_parallel_schedule = 'Interleaved1F1F'",
        "FILE:2: parallelism.pipeline_parallel_schedule: must be one of 1F1B, Interleaved1F1B, GPipe",
    ),
    "model without text": (
        "[model]\nname = 'flux'",
        'FILE:2: model.name: "flux" is no text model; there are llama3, qwen3, deepseek_v3, gpt_oss',
    ),
    "rule between settings": (
        "[lighthouse]\nheartbeat_timeout_s = 0.5",
        "FILE:2: lighthouse.heartbeat_interval_s: (0.5 s) must be less than lighthouse.heartbeat_timeout_s (0.5 s)",
    ),
    "schedule shorter than the run": (
        "[lr_scheduler]\ntotal_steps = 5\n[training]\nsteps = 9",
        "FILE:2: lr_scheduler.total_steps: (5) is less than training.steps (9)",
    ),
    "missing key of an array of tables": (
        "[[data.sources]]\npath = 'a'\n[[data.sources]]\nweight = 2",
        "FILE:3: data.sources[1].path: is missing",
    ),
    "typo in an entry of an array of tables": (
        "[[data.sources]]\npath = 'a'\nwieght = 2",
        "FILE:3: data.sources[0].wieght: unknown key; did you mean data.sources[0].weight?",
    ),
    "range in an inline table": (
        "[data]\nsources = [\n  {path = 'a'},\n  {path = 'b', weight = 0},\n]",
        "FILE:4: data.sources[1].weight: must be greater than 0, got 0.0",
    ),
    "longer than milliseconds can count": (
        "[transport]\nexchange_timeout_s = 1e30",
        "FILE:2: transport.exchange_timeout_s: must be greater than 0 and at most 2000000, got 1e+30",
    ),
    "block of no even number": (
        "[semi_sync.codec]\nwire = 'int8'\nblock = 63",
        "FILE:3: semi_sync.codec.block: must be an even number from 2 to 65536, got 63",
    ),
    "rate too low for a message": (
        "[transport]\nmax_rate = 0.001",
        "FILE:2: transport.max_rate: (0.001 Mbit/s) is too low: 1 MiB, which is sent at once, takes longer at that rate than "
        "transport.exchange_timeout_s (90.0 s); raise one of them",
    ),
    "retired key": (
        "[model]\nprint_after_conversion = true",
        "FILE:2: model.print_after_conversion: gone in TorchTitan 0.3: remove it",
    ),
    "retired value": (
        '[activation_checkpoint]\nselective_ac_option = "2"',
        'FILE:2: activation_checkpoint.selective_ac_option: gone in TorchTitan 0.3: only "op" exists',
    ),
    "retired section": (
        "[memory_estimation]\nx = 1",
        "FILE:2: memory_estimation.x: gone in TorchTitan 0.3: remove the table",
    ),
    "syntax": ("[training]\nsteps = \n", "FILE:2: is not valid TOML: Invalid value (column 9)"),
    "key twice": (
        "[training]\nsteps = 1\nsteps = 2\n",
        "FILE:3: is not valid TOML: Cannot overwrite a value",
    ),
    "unfinished string": ('[training]\ndataset = """x\n\n', "FILE:4: is not valid TOML: Unterminated string"),
    "line break in a key": ('[training]\n"a\\nb" = 1', "FILE:2: training.a\\nb: unknown key"),
}


def test_what_is_not_used_or_spelt_in_capitals_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        "[training]\ndataset = 'mine'\n[data]\nsources = [{path = 'a'}]\n[validation]\ndataset = 'mine'\n"
        "[parallelism]\npipeline_parallel_schedule = 'interleaved1f1b'\n"
    )
    assert load_config(file)
    file.write_text("[training]\ndataset = 'C4'\n[data]\nshards = 1\n[semi_sync]\nnum_islands = 2\n")
    assert load_config(file)


def test_sources_after_one_without_a_path_keep_their_numbers_and_lines(tmp_path: Path) -> None:
    text = '[[data.sources]]\nweight = 2\n[[data.sources]]\npath = "a"\npresent = "x"\n[data]\nshards = 1\n'
    assert [p.partition(": must")[0] for p in problems(tmp_path, text)] == [
        "FILE:1: data.sources[0].path: is missing",
        "FILE:5: data.sources[1].present",
    ]


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_degree", "context_parallel_degree", "enable_async_tensor_parallel"]
)
def test_fr_22_settings_that_were_experimental_are_found_in_parallelism(tmp_path: Path, name: str) -> None:
    (found,) = problems(tmp_path, f"[experimental]\n{name} = 2\n")
    assert found.startswith(
        f"FILE:2: experimental.{name}: gone in TorchTitan 0.3: it is in [parallelism] now"
    )
    assert found.endswith(f"write parallelism.{name}")


@pytest.mark.parametrize(("text", "expected"), ONE_MISTAKE.values(), ids=ONE_MISTAKE.keys())
def test_a_mistake_is_one_line_with_file_line_key_and_remedy(
    tmp_path: Path, text: str, expected: str
) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(expected)
    assert "\n" not in found[0]


COMMAND_LINE = {
    "typo": (["--optimizer.lrr=3"], "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
    "typo with a value": (["--optimizer.lrr", "3"], "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
    "wrong section": (
        ["--training.warmup_steps", "3"],
        "training.warmup_steps: unknown key; did you mean lr_sch",
    ),
    "unknown section": (
        ["--trainign.steps", "3"],
        "trainign.steps: unknown key; did you mean training.steps",
    ),
    "type": (["--training.steps", "3.0"], 'training.steps: must be an integer, got "3.0"'),
    "number": (["--optimizer.lr", "fast"], 'optimizer.lr: must be a number, got "fast"'),
    "not finite": (["--optimizer.lr", "nan"], "optimizer.lr: must be a finite number, got nan"),
    "boolean": (["--checkpoint.enable=yes"], 'checkpoint.enable: must be true or false, got "yes"'),
    "choice": (
        ["--training.dtype", "float16"],
        'training.dtype: must be "bfloat16" or "float32", got "float16"',
    ),
    "range": (["--island.id", "-1"], "island.id: must be at least 0, got -1"),
    "value missing at the end": (["--training.steps"], "training.steps: a value is missing"),
    "value missing in between": (
        ["--training.steps", "--debug.deterministic"],
        "training.steps: a value is missing",
    ),
    "stray argument": (["steps"], "steps: unexpected argument"),
    "section": (["--training", "3"], "training: is a section; settings are written --training.KEY value"),
    "retired": (["--experimental.x", "y"], "experimental.x: gone in TorchTitan 0.3: remove the table"),
    "moved": (
        ["--model.tokenizer_path", "x"],
        "model.tokenizer_path: is model.hf_assets_path now; write --model.hf_",
    ),
    "second file": (["--job.config_file", "b.toml"], "job.config_file: the file is given already"),
    "negated non-boolean": (
        ["--no-training.steps"],
        "no_training.steps: unknown key; did you mean training.steps",
    ),
    "negation with a value": (["--no-checkpoint.enable=true"], "checkpoint.enable: takes no value"),
    "wrong choice in a list": (
        ["--model.converters", "quantize.linear.flaot8"],
        'model.converters: item 1 must be "quantize.linear.float8", "quantize.linear.mx"',
    ),
    "broken JSON": (["--data.sources", "[{]"], "data.sources: is not valid JSON"),
    "JSON of the wrong shape": (["--data.sources", "[3]"], "data.sources[0]: must be a table"),
    "typo in JSON": (
        ["--data.sources", '[{"path": "a", "wieght": 1.0}]'],
        "data.sources[0].wieght: unknown key; did you mean data.sources[0].weight?",
    ),
    "range in JSON": (
        ["--data.sources", '[{"path": "a", "weight": -1}]'],
        "data.sources[0].weight: must be greater than 0, got -1.0",
    ),
}


@pytest.mark.parametrize(("argv", "expected"), COMMAND_LINE.values(), ids=COMMAND_LINE.keys())
def test_mistakes_on_the_command_line_say_so(tmp_path: Path, argv: list[str], expected: str) -> None:
    found = problems(tmp_path, "[[data.sources]]\npath = 'z'\n", *argv)
    assert len(found) == 1
    assert found[0].startswith(f"command line: {expected}")


def test_all_problems_come_at_once_in_the_order_of_the_file_then_the_command_line(tmp_path: Path) -> None:
    text = "\n".join(
        pair[0] for name, pair in ONE_MISTAKE.items() if name in ("typo in a key", "wrong choice")
    )
    found = problems(
        tmp_path,
        text + '\n[training]\nsteps = "3"\nseq_len = 0\n[trainign]\n',
        "--island.port",
        "70000",
        "--optimizer.lrr=1",
    )
    assert [p.partition(": ")[0] for p in found] == ["FILE:2", "FILE:4", "FILE:6", "FILE:7", "FILE:8"] + [
        "command line"
    ] * 2


def test_a_range_is_judged_after_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nsteps = 0")
    assert load_config(file, ["--training.steps", "4"]).config.training.steps == 4


def test_rules_are_silent_about_settings_that_are_already_wrong(tmp_path: Path) -> None:
    text = '[lighthouse]\nheartbeat_interval_s = "9"\nheartbeat_timeout_s = 0.1'
    assert len(problems(tmp_path, text)) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "no such file or directory"), (b"\xff\xfe\x00", "is not UTF-8 text")],
    ids=["missing", "binary"],
)
def test_unreadable_files(tmp_path: Path, content: bytes | None, expected: str) -> None:
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["--trainign.steps", "1"])
    assert len(caught.value.problems) == 2
    assert caught.value.problems[0].startswith(f"{file}: ")
    assert expected in caught.value.problems[0]


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_deeply_nested_text_is_refused_not_a_crash(tmp_path: Path) -> None:
    assert "is not valid TOML" in problems(tmp_path, "a = " + "[" * 5000)[0]
    assert "is not valid TOML" in problems(tmp_path, "a = " + "9" * 5000)[0]


@pytest.mark.parametrize("key", sorted(RETIRED))
def test_every_retired_key_is_refused_with_its_remedy(tmp_path: Path, key: str) -> None:
    section, _, leaf = key.rpartition(".")
    text = f'[{section}]\n{leaf} = "some value"' if section else f"[{key}]\nx = 1"
    switched_on = ["--parallelism.pipeline_parallel_degree", "2"] if section == "parallelism" else []
    if section.startswith("quantize."):
        switched_on = ["--model.converters", json.dumps([section])]
    assert RETIRED[key] in problems(tmp_path, text, *switched_on)[0]


def test_retired_keys_are_accepted_with_a_note_where_they_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    for key, values in HARMLESS.items():
        section, _, leaf = key.rpartition(".")
        for value in values:
            file.write_text(tomli_w.dumps({section: {leaf: value}}))
            assert f"{key} at {file}:2 has no effect" in load_config(file).notes[0]


def test_validate_answers_in_two_seconds_without_importing_torch(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[training]\nstep = 1\n")
    done = validate(file, timeout_s=10)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"error: {file}:2: training.step: unknown key; did you mean training.steps?\n"


def test_a_mistake_is_answered_within_two_seconds(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[training]\nstep = 1\n")
    command = [sys.executable, "-m", "torchtitan_diloco", "validate", str(file)]
    # The time-out is the assertion: it raises.
    assert subprocess.run(command, capture_output=True, timeout=2, check=False).returncode == 2
