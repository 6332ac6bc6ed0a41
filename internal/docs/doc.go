// Package docs reads the documentation for tests, so that what it shows is what compiles and runs.
package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"runtime"
)

// Root is the directory of README.md and docs/.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// A Block is a piece of code in a page.
type Block struct {
	Page string // such as docs/sql.md
	Text string
}

var fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

// Blocks returns the code blocks of a language in pages, which are named relative to Root.
func Blocks(language string, pages ...string) ([]Block, error) {
	var blocks []Block
	for _, page := range pages {
		text, err := os.ReadFile(filepath.Join(Root(), page))
		if err != nil {
			return nil, err
		}
		for _, m := range fence.FindAllStringSubmatch(string(text), -1) {
			if m[1] == language {
				blocks = append(blocks, Block{Page: page, Text: m[2]})
			}
		}
	}
	return blocks, nil
}
