"""What all attention shares: the float64 reference, the streaming softmax of CPUs, and the merge of partial results."""
