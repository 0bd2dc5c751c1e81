"""Communication: what a collective is, what it costs, how it is simulated, how torch.distributed
does it.
"""
