"""The process that steps the optimizer. Import its modules one by one: `settings` without torch, the rest with it."""
