"""What starts, patches and watches a vllm-rbln server: artifacts, devices, launch, patches, observer and twin."""
