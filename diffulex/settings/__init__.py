"""The one settings table: sections, what models and strategies change, and every way in and out."""
