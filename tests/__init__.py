"""Helpers and checks that tests share. A package, so that it comes before one of that name which a wheel brings, as
textstat does."""
