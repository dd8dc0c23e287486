"""The learning rate as a function of run progress."""

from torchtitan.components.optimizer import LRSchedulersContainer


def move_schedule(schedulers: LRSchedulersContainer, step: int) -> None:
    """Put the inner learning rate where it is after ``step`` steps of the run.

    TorchTitan 0.3.0's ``load_state_dict`` sets the position but leaves the parameter groups' rate until the next step.
    """
    for scheduler in schedulers.schedulers:
        scheduler.last_epoch = step
        rates = [
            base * scale(step) for base, scale in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
