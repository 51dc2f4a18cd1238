"""Archives: stores compressed so that ranges can be read, and stores read where they lie, behind URLs too."""
