"""One tiny model in several layouts and variants: gathered, scattered and gathered again through real trainers."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.distributed.activation_checkpoint import FullAC

from tests.helpers import tiny
from torchtitan_diloco.errors import UserError
from torchtitan_diloco.island.group import IslandGroup
from torchtitan_diloco.island.parameters import IslandParameters
from torchtitan_diloco.outer.fragments import Fragment, whole_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "fsdp": {"parallelism.data_parallel_shard_degree": 2},
    "tp": {"parallelism.tensor_parallel_degree": 2},
    "fsdp-tp": {"parallelism.data_parallel_shard_degree": 2, "parallelism.tensor_parallel_degree": 2},
    "hsdp": {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 2},
    "pp": {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule": "1F1B"},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "vocabulary-61": {"vocab": 61},
    "tied": {"tied": True},
    "frozen": {},
    "bfloat16": {"training.dtype": "bfloat16"},
    "buffers": {},
    "wrapped": {"activation_checkpoint": FullAC.Config},
}

BUFFER, SCRATCH = "layers.0.feed_forward.usage", "layers.0.feed_forward.scratch"
FROZEN = ("tok_embeddings.weight", "layers.0.attention.wo.weight")


def build(layout: str, variant: str, folder: Path) -> Any:
    """A trainer of the tiny model, changed as the variant says."""
    options = {**LAYOUTS[layout], **VARIANTS[variant]}
    if isinstance(options.get("activation_checkpoint"), type):
        options["activation_checkpoint"] = options["activation_checkpoint"]()
    options.setdefault("vocab", 128)
    config = tiny.tiny_trainer_config(
        seq_len=16, dump_folder=str(folder), **{"comm.init_timeout_seconds": 30, **options}
    )
    trainer = tiny.build_trainer(config)
    for part in trainer.model_parts:
        if variant == "frozen":
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(name not in FROZEN)
        if variant == "buffers":
            count_usage(part)
    return trainer


def count_usage(part: nn.Module) -> None:
    """A persistent buffer that the forward pass changes, as routers of experts have, and one that is scratch space."""
    module = part.layers["0"].feed_forward
    module.register_buffer("usage", torch.full((3,), 0.25))
    module.register_buffer("scratch", torch.full((3,), 0.5), persistent=False)
    module.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def count(module: nn.Module, args: Any, out: Any) -> None:
        if module.training and torch.is_grad_enabled():
            module.usage.mul_(0.9).add_(0.3)
            module.scratch.add_(1)
            module.calls.add_(1)

    module.register_forward_hook(count)


def random_flat(fragment: Fragment) -> torch.Tensor:
    """Values that no initialisation or training gives, the same in every process; exact zeros and tiny ones too."""
    flat = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(fragment.numel))
    flat[::7] *= 1e-30
    flat[::11] = 0
    return flat


def rounded(fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
    """What is left of ``flat`` in the dtypes that the island trains in."""
    return torch.cat([flat[piece.slice].to(piece.spec.dtype).float() for piece in fragment.pieces])


def digest(flat: torch.Tensor) -> str:
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


@torch.no_grad()
def logits(trainer: Any) -> list[float] | None:
    """The model's answers, the last four positions of the first two rows; None for a part of a pipeline."""
    if trainer.parallel_dims.pp_enabled:
        return None
    loader = tiny.SyntheticDataLoader
    batch, labels = next(
        iter(
            loader(
                loader.Config(seed=5, vocab=trainer.config.dataloader.vocab),
                dp_world_size=1,
                dp_rank=0,
                tokenizer=None,
                seq_len=16,
                local_batch_size=2,
            )
        )
    )
    inputs, _, extra = trainer.post_dataloading_process(batch, labels)
    with trainer.train_context():
        out = trainer.model_parts[0](inputs, **extra)
    if trainer.parallel_dims.tp_enabled:  # each rank has the logits of its part of the vocabulary
        parts = [torch.empty_like(out) for _ in range(trainer.parallel_dims.tp)]
        dist.all_gather(parts, out.contiguous(), group=trainer.parallel_dims.get_mesh("tp").get_group())
        out = torch.cat(parts, dim=-1)
    return out[:, -4:].float().flatten().tolist()


def run_case(
    *, layout: str, variant: str, folder: str, gathered_to: str, gathered_elsewhere: str | None
) -> dict[str, Any]:
    """Train two steps and gather (to a file); scatter random values and gather; scatter another layout's and gather."""
    trainer = build(layout, variant, Path(folder))
    group = IslandGroup(60)
    parameters = IslandParameters(trainer.model_parts, group)
    (fragment,) = whole_model(list(parameters.specs.values()))

    def hold(flat: torch.Tensor) -> torch.Tensor | None:
        parameters.scatter(fragment, flat if group.is_gateway else None)
        mine, out = parameters.snapshot(fragment), torch.full_like(flat, torch.nan)
        again = parameters.snapshot(fragment, out=out)
        assert group.is_gateway == (again is out) and (mine is None or mine.equal(out))
        return mine

    facts: dict[str, Any] = {
        "tensors": {p.spec.name: [list(p.spec.shape), str(p.spec.dtype)] for p in fragment.pieces},
        "wrappers": sum(
            "_checkpoint_wrapped_module" in n for p in trainer.model_parts for n, _ in p.named_parameters()
        ),
        "whole": sum(
            box.shape == parameters.specs[name].shape for name, box in parameters._boxes[group.rank].items()
        ),
    }
    founding = parameters.snapshot(fragment)
    tiny.train_steps(trainer, 2)
    gathered = parameters.snapshot(fragment)
    scratch = [float(b[0]) for p in trainer.model_parts for n, b in p.named_buffers() if n == SCRATCH]
    facts["logits"] = logits(trainer)  # leaves FSDP's whole copies behind, which scatter must not overlook
    flat = random_flat(fragment)
    random_again = hold(flat)
    facts["random_logits"] = logits(trainer)
    if group.is_gateway:
        assert founding is not None and gathered is not None and random_again is not None
        expected = rounded(fragment, flat)
        facts |= {
            "founding": digest(founding),
            "trained": not torch.equal(founding, gathered),
            "identity": torch.equal(random_again, expected),
            "random": digest(random_again),
            "random_values_changed_it": not torch.equal(random_again, gathered),
            "changed": [
                p.spec.name for p in fragment.pieces if not torch.equal(founding[p.slice], gathered[p.slice])
            ],
        }
        save_file({"flat": gathered}, gathered_to)
    if gathered_elsewhere is not None:
        other = load_file(gathered_elsewhere)["flat"]
        again = hold(other)
        facts["other_logits"] = logits(trainer)
        if group.is_gateway:
            facts["other_identity"] = torch.equal(again, other)
    facts["scratch"] = [
        scratch,
        [float(b[0]) for p in trainer.model_parts for n, b in p.named_buffers() if n == SCRATCH],
    ]
    trainer.close()
    group.close()
    return facts


def alone(variant: str, folder: Path, gathered_elsewhere: Path | None = None) -> dict[str, Any]:
    """The facts of the variant on one rank, in this process; it gathers to ``alone-<variant>.safetensors``."""
    with tiny.single_rank():
        return run_case(
            layout="alone",
            variant=variant,
            folder=str(folder),
            gathered_to=str(folder / f"alone-{variant}.safetensors"),
            gathered_elsewhere=str(gathered_elsewhere) if gathered_elsewhere else None,
        )


def refused() -> dict[str, Any]:
    """What each rank is told of a layout that only one rank finds fault with."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Module()
    local = torch.zeros(4 - dist.get_rank())
    # Seven rows as 4 and 3 are fine; rank 1 claims to hold one less than it should.
    shape, stride = torch.Size([7]), (1,)
    if dist.get_rank() == 1:
        local = local[1:]
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride))
    try:
        IslandParameters([model], IslandGroup(30))
    except UserError as error:
        return {"error": str(error)}
    return {"error": ""}
