"""Decisions on requests that change objects: uploads, compactions, adoption, maintenance."""
