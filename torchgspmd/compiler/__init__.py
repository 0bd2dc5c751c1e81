"""From a module to a Plan: options, programs, decisions and their reasons."""
