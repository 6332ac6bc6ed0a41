package doctor

import "strconv"

// An ID is a task's. As JSON it is a string: numbers there are exact to 2^53 only.
type ID int64

func (id ID) String() string { return strconv.FormatInt(int64(id), 10) }

func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }
