"""How raw data becomes a Cohort: one module a layout, plus the commands that check and prepare it."""
