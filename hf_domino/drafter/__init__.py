"""All that runs at inference. Ships inside every published drafter, so it imports torch, transformers and itself."""
