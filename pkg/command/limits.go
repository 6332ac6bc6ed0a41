package command

// Limits of what an attempt leaves in the table, in bytes.
const (
	maxErrorText = 8 << 10
	maxStackText = 32 << 10
	maxClassText = 64
)
