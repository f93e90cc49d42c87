"""YAML overlays for the command: `--config tasks/running_sums` is tasks/running_sums.yaml here."""
