"""The local launcher's parts: run folder, child processes, supervision, live table."""
