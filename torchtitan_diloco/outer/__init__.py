"""The pure part of semi-synchronous training: fragments, slots, merge rules, outer optimizers, policy, digests.

Nothing here knows torch.distributed, TorchTitan, sockets or clocks: it is arithmetic on tensors and decisions on plain
values, so that production, the in-memory harness and the planner run the very same code.
"""
