"""Models: loading, quantisation of keys and values, the runner, CUDA graphs, compiled and packed layers, pool sizing."""
