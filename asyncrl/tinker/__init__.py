"""Several people's training loops on one base model, each with a LoRA adapter of its own, over HTTP. See TINKER.md."""
