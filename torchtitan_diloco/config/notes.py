"""Remarks on a valid configuration: settings that do not do what one might think."""

from collections.abc import Callable, Mapping

from torchtitan_diloco.config.fields import get, keys
from torchtitan_diloco.config.problems import DEFAULT
from torchtitan_diloco.config.schema import RunConfig
from torchtitan_diloco.config.upstream import base_values

_MODEL_OF_BASE = ("model.name", "model.flavor", "parallelism.expert_parallel_comm_backend")

_WITHOUT_EXCHANGE = ("semi_sync.method", "semi_sync.num_islands")

_OUTER_IS_NOT_USED = {
    "sync": "there is no outer optimizer",
    "local_sgd": "the mean of the parameters replaces them",
}

_USELESS: tuple[tuple[str, tuple[str, ...], Callable[..., bool], str], ...] = (
    (
        "semi_sync.codec.error_feedback",
        ("semi_sync.codec.wire",),
        lambda feedback, wire: feedback and wire == "fp32",
        '{0}: has no effect with semi_sync.codec.wire = "{1}", which loses nothing',
    ),
    (
        "semi_sync.codec.rounding",
        ("semi_sync.codec.wire",),
        lambda rounding, wire: rounding == "stochastic" and wire == "fp32",
        '{0}: has no effect with semi_sync.codec.wire = "{1}", which does not round',
    ),
    (
        "semi_sync.outer.min_lr_factor",
        ("semi_sync.outer.schedule",),
        lambda factor, schedule: schedule == "constant",
        '{0}: has no effect with semi_sync.outer.schedule = "{1}"',
    ),
    (
        "semi_sync.fragment_by",
        ("semi_sync.module_fqns_per_fragment",),
        lambda by, lists: bool(lists),
        "{0}: has no effect with semi_sync.module_fqns_per_fragment, which says what the fragments are",
    ),
)
"""(key, others, when it has no effect, the note)."""

_OF_ITS_LOADER = (
    "training.dataset",
    "training.dataset_path",
    *(key for key in keys() if key.startswith("training.dataloader.")),
)


def notes(config: RunConfig, origins: Mapping[str, str]) -> list[str]:
    """One sentence each; ``origins`` as in `Resolved`."""
    c = config
    found = []
    if c.activation_checkpoint.mode == "selective":
        found.append(
            'activation_checkpoint.mode = "selective" works per operation in TorchTitan 0.3 '
            "(v0.2's default was every second layer)"
        )
    total = c.lr_scheduler.total_steps or c.training.steps
    if c.lr_scheduler.warmup_steps >= total:
        found.append(
            f"lr_scheduler.warmup_steps ({c.lr_scheduler.warmup_steps}) leaves none of {total} steps: "
            f"TorchTitan shortens the warm-up to {total} and the learning rate never decays"
        )
    written = [key for key in _OF_ITS_LOADER if not origins[key].startswith((DEFAULT, "base "))]
    if c.data.sources and written:
        found.append(
            f"{' and '.join(written)}: not used, because [[data.sources]] is given; its loader reads in the trainer's own "
            "process"
        )
    if not c.data.sources:
        found.append(
            f'training.dataset = "{c.training.dataset}" is read by TorchTitan\'s own loader, which keeps no ledger of what '
            "was trained on; [[data.sources]] does"
        )
    if c.job.base:
        base = base_values(c.job.base)
        changed = [key for key in _MODEL_OF_BASE if get(c, key) != base[key]]
        if changed or c.model.converters:
            found.append(
                f'job.base = "{c.job.base}" is of another model (see {", ".join(changed or ["model.converters"])}): its '
                "attention, conversions and loss are not used, its other settings are"
            )
    if c.semi_sync.method in _OUTER_IS_NOT_USED and any(
        not origin.startswith(DEFAULT) for k, origin in origins.items() if k.startswith("semi_sync.outer.")
    ):
        found.append(
            f'semi_sync.method = "{c.semi_sync.method}": [semi_sync.outer] is not used, '
            + _OUTER_IS_NOT_USED[c.semi_sync.method]
        )
    if c.semi_sync.method == "sync":
        if not c.training.disable_cuda_graphs:
            found.append(
                'semi_sync.method = "sync": CUDA graphs are off, as if training.disable_cuda_graphs were true'
            )
    elif c.semi_sync.method != "none" and c.semi_sync.sync_every > c.training.steps:
        found.append(
            f"semi_sync.sync_every ({c.semi_sync.sync_every}) is more than training.steps ({c.training.steps}): "
            "the islands exchange only once, at the last step"
        )
    if c.semi_sync.method not in ("none", "sync"):
        found += [
            note.format(key, *(get(c, k) for k in also))
            for key, also, useless, note in _USELESS
            if not origins[key].startswith(DEFAULT) and useless(get(c, key), *(get(c, k) for k in also))
        ]
    if c.semi_sync.method == "none" and c.semi_sync.num_islands > 1:
        found.append(f'semi_sync.method = "none": the {c.semi_sync.num_islands} islands train on their own')
    if c.semi_sync.method == "none":
        found += [
            f'{key}: has no effect with semi_sync.method = "none", which exchanges nothing'
            for key, origin in origins.items()
            if key.startswith("semi_sync.")
            and key not in _WITHOUT_EXCHANGE
            and not origin.startswith(DEFAULT)
        ]
    if c.semi_sync.found == "any" and c.semi_sync.num_islands > 1:
        found.append(
            'semi_sync.found = "any": an island that meets nobody within lighthouse.patience_s founds the run alone; when '
            "islands meet that have done so apart, the history with more committed tokens goes on and the other is put aside"
        )
    if not c.checkpoint.enable:
        found.append("checkpoint.enable = false: a stopped run cannot be continued")
    elif c.checkpoint.last_save_model_only:
        found.append(
            "checkpoint.last_save_model_only = true: a finished run cannot be continued from its last checkpoint"
        )
    return found
