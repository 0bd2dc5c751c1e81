"""From a module to a Plan: options, programs, what was decided and why."""
