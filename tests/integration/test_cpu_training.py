"""TorchTitan's own trainer trains on the CPU: loss falls, ranks do not change the result, document masks count."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from torchtitan.models import llama3
from torchtitan.models.common import decoder
from torchtitan.models.common.attention import get_causal_mask_mod

from tests.helpers import tiny

REPO = Path(__file__).parents[2]


def run_ranks(world_size: int, folder: Path, **options) -> list[list[float]]:
    """Losses of every rank of a run in processes of its own, without torchrun."""
    port, processes = tiny.free_port(), []
    results = [folder / f"{world_size}-ranks-rank-{rank}.json" for rank in range(world_size)]
    options["dump_folder"] = str(folder)
    for rank, result in enumerate(results):
        words = [str(rank), str(world_size), str(port), str(result), json.dumps(options)]
        command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.train_rank", *words]
        processes.append(
            subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        outputs = [process.communicate(timeout=120)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)
    return [json.loads(result.read_text()) for result in results]


def test_debugmodel_trains_on_one_rank_and_the_loss_falls(tmp_path):
    config = tiny.tiny_trainer_config(
        steps=15,
        seq_len=64,
        batch=4,
        lr=2e-3,
        model_spec=llama3.model_registry("debugmodel"),
        dump_folder=str(tmp_path),
    )
    # A small part of the vocabulary, so that few steps suffice.
    config.dataloader.vocab = 61
    with tiny.single_rank():
        trainer = tiny.build_trainer(config)
        losses = tiny.record_losses(trainer)
        trainer.train()
        trainer.close()
    assert len(losses) == 15
    assert losses[0] == pytest.approx(math.log(2048), rel=0.2)
    assert losses[-1] < 0.6 * losses[0]


RUN = {"steps": 20, "vocab": 64, "lr": 3e-3}


@pytest.fixture(scope="module")
def losses_of_one_rank(tmp_path_factory) -> list[float]:
    (losses,) = run_ranks(1, tmp_path_factory.mktemp("alone"), batch=4, **RUN)
    return losses


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"batch": 2}, id="FSDP"),
        pytest.param({"batch": 4, "parallelism.tensor_parallel_degree": 2}, id="TP"),
    ],
)
def test_two_ranks_train_as_one_rank_does(layout, losses_of_one_rank, tmp_path):
    first, second = run_ranks(2, tmp_path, **layout, **RUN)
    assert first == second
    assert len(first) == 20
    assert first[-1] < 0.7 * first[0]
    # Same rows, same initial weights; only the order of sums differs.
    torch.testing.assert_close(torch.tensor(first), torch.tensor(losses_of_one_rank), rtol=1e-4, atol=0)


def test_bfloat16_that_the_user_asks_for_is_what_computes():
    config = tiny.tiny_trainer_config(vocab=61, **{"training.mixed_precision_param": "bfloat16"})
    seen = set()
    with tiny.single_rank():
        trainer = tiny.build_trainer(config)
        trainer.model_parts[0].layers["0"].attention.wo.register_forward_hook(
            lambda module, args, out: seen.add(out.dtype)
        )
        losses = tiny.train_steps(trainer, 3)
        trainer.close()
    assert seen == {torch.bfloat16}
    assert losses[-1] < losses[0]


def losses_of(**loader) -> list[float]:
    config = tiny.tiny_trainer_config(steps=15, vocab=61, batch=4)
    for name, value in loader.items():
        setattr(config.dataloader, name, value)
    with tiny.single_rank():
        trainer = tiny.build_trainer(config)
        losses = tiny.train_steps(trainer, 15)
        trainer.close()
    return losses


def test_document_mask_changes_the_loss_of_packed_rows_and_of_no_others(monkeypatch):
    packed, unpacked = losses_of(), losses_of(one_document_per_row=True)

    def plain_causal(mask_mod, B, H, Q_LEN, KV_LEN, device, **options):
        return create_mask(get_causal_mask_mod(), B, H, Q_LEN, KV_LEN, device=device)

    monkeypatch.setattr(decoder, "create_attention_mask", plain_causal)
    packed_causal = losses_of()
    # The untrained model attends weakly, far above rounding (1e-6) all the same; training makes the difference plain.
    assert abs(packed_causal[0] - packed[0]) > 1e-4
    assert abs(packed_causal[-1] - packed[-1]) > 1e-2
    assert losses_of(one_document_per_row=True) == unpacked
