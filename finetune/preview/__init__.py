"""Look at the data as the model will see it: rows, labels, lengths, packing, ledger, gate."""
