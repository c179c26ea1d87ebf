"""From files to rows: load, recognise, render, pack, collate."""
