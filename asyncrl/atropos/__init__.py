"""The Atropos contract: its server for environments written elsewhere, in a run or alone, and its client."""
