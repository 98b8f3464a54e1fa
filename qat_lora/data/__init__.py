"""From documents to rows of tokens: where text comes from, chats, packing and masks."""
