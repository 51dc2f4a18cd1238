"""datakit: text corpus to token store to blended, packed, exactly resumable batches."""
