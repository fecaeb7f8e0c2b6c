"""FedSilo: federated post-training with a gate at each site."""

__version__ = "0.1.0"
