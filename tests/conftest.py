import torch

# Tests run in parallel processes: more threads each would only get in each other's way.
torch.set_num_threads(1)
