"""Messages of the contract as requests and answers of the metadata, and back."""
