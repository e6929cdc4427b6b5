"""tpu-inference, the TPU plugin of vLLM: the reader of its batch statistics."""
