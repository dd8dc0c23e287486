"""The hub: membership, merge and outer step of a run in one place, for islands that cannot reach one another."""
