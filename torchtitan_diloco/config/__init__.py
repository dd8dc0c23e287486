"""The TOML configuration: schema, loading with every mistake reported, translation to TorchTitan's."""
