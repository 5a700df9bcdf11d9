package jetbox_test

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The layout of this module, as rules a test can break. Imports point one way:
//
//	root <- libraries <- their backends and suites <- cmd, examples, tests
//
// A library is a top-level folder other than cmd, examples and internal. No
// library sees another; only cmd, examples and _test.go files wire them.

const (
	modulePath = "github.com/seed-5e04d8fb/jetbox"
	serverPath = "github.com/nats-io/nats-server/"

	maxFileLines      = 600
	minPkgCommentLine = 3
)

// rootMayImport holds the pure helpers the root package may use beside the
// standard library. Everything that imports jetbox links these.
var rootMayImport = []string{
	"github.com/cenkalti/backoff/v4",
	"github.com/google/uuid",
	"github.com/gowebpki/jcs",
}

// bannedNames say nothing about what a package does, so everything ends up there.
var bannedNames = []string{
	"base", "common", "helper", "helpers", "misc", "models", "shared", "types", "util", "utils",
}

// importRule returns the rule that the import breaks, or "". dir is the
// importing package's folder relative to the module, "" for the root.
func importRule(dir string, test bool, imp string) string {
	if strings.HasPrefix(imp, serverPath) && !test && library(dir) != "embedded" {
		return "nats-server is imported only by embedded and by tests"
	}
	if test {
		return "" // tests wire whatever they need
	}
	target, local := localDir(imp)
	switch {
	case !local && dir == "":
		if isStandard(imp) || slices.Contains(rootMayImport, imp) {
			return ""
		}
		return "the root package imports only the standard library and the helpers in rootMayImport"
	case !local:
		return ""
	case dir == "":
		return "the root package imports nothing of this module"
	case program(target) != "" && program(target) == program(dir):
		return "" // a program may have folders of its own
	case library(target) == "cmd" || library(target) == "examples":
		return "nothing imports cmd or examples"
	case library(dir) == "cmd" || library(dir) == "examples":
		return ""
	case target == "" || library(target) == "internal":
		return ""
	case library(dir) == "internal":
		return "internal packages import the root and each other, nothing above them"
	case library(dir) != library(target):
		return "libraries do not import each other; only cmd, examples and tests wire them"
	case dir == library(dir):
		return "a library does not import its own backends or suites"
	case target == library(dir):
		return ""
	default:
		return "a backend or suite imports only the root and its own parent"
	}
}

// library returns the first element of a package folder.
func library(dir string) string {
	first, _, _ := strings.Cut(dir, "/")
	return first
}

// program returns the folder of the command or example that dir belongs to, or
// "".
func program(dir string) string {
	parts := strings.SplitN(dir, "/", 3)
	if len(parts) < 2 || (parts[0] != "cmd" && parts[0] != "examples") {
		return ""
	}
	return path.Join(parts[:2]...)
}

// localDir returns the folder an import path of this module names.
func localDir(imp string) (dir string, local bool) {
	if imp == modulePath {
		return "", true
	}
	return strings.CutPrefix(imp, modulePath+"/")
}

func isStandard(imp string) bool {
	return !strings.Contains(library(imp), ".")
}

// A sourceFile is what the rules look at in one file.
type sourceFile struct {
	name      string // slash-separated, relative to the module
	pkg       string
	test      bool
	generated bool
	lines     int
	imports   []string
	doc       int // lines of package comment
}

func (f sourceFile) dir() string {
	if d := path.Dir(f.name); d != "." {
		return d
	}
	return ""
}

func parseSource(name string, src []byte) (sourceFile, error) {
	parsed, err := parser.ParseFile(token.NewFileSet(), name, src, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return sourceFile{}, err
	}
	f := sourceFile{
		name:      name,
		pkg:       parsed.Name.Name,
		test:      strings.HasSuffix(name, "_test.go"),
		generated: ast.IsGenerated(parsed),
		lines:     bytes.Count(src, []byte("\n")),
	}
	if parsed.Doc != nil {
		f.doc = strings.Count(parsed.Doc.Text(), "\n")
	}
	for _, spec := range parsed.Imports {
		imp, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return sourceFile{}, err
		}
		f.imports = append(f.imports, imp)
	}
	return f, nil
}

// violations returns a line per broken rule, each naming the offending file.
func violations(files []sourceFile) []string {
	var out []string
	report := func(where, format string, args ...any) {
		out = append(out, where+": "+fmt.Sprintf(format, args...))
	}
	docs := map[string][]sourceFile{} // folder to its non-test files
	for _, f := range files {
		for _, imp := range f.imports {
			if rule := importRule(f.dir(), f.test, imp); rule != "" {
				report(f.name, "imports %s: %s", imp, rule)
			}
		}
		if f.lines > maxFileLines && !f.generated {
			report(f.name, "%d lines: a file has at most %d, split it", f.lines, maxFileLines)
		}
		if name := path.Base("/" + f.dir()); slices.Contains(bannedNames, f.pkg) || slices.Contains(bannedNames, name) {
			report(f.name, "package %s in folder %s: a package is named after what it does", f.pkg, name)
		}
		if !f.test {
			docs[f.dir()] = append(docs[f.dir()], f)
		}
	}
	for dir, members := range docs {
		var with []string
		for _, f := range members {
			if f.doc == 0 {
				continue
			}
			with = append(with, f.name)
			if f.doc < minPkgCommentLine {
				report(f.name, "%d lines of package comment, want at least %d: it is the contract", f.doc, minPkgCommentLine)
			}
		}
		if len(with) != 1 {
			where := "./" + dir
			if len(with) > 1 {
				where = strings.Join(with, ", ")
			}
			report(where, "%d files with a package comment, want exactly one", len(with))
		}
	}
	slices.Sort(out)
	return out
}

// readModule parses every Go file of this module.
func readModule(t *testing.T) []sourceFile {
	t.Helper()
	root := os.DirFS(".")
	var files []sourceFile
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if base := d.Name(); name != "." && (base == "testdata" || base[0] == '.' || base[0] == '_') {
				return fs.SkipDir
			}
			return nil
		}
		if path.Ext(name) != ".go" {
			return nil
		}
		src, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		f, err := parseSource(name, src)
		if err != nil {
			return err
		}
		files = append(files, f)
		return nil
	})
	if err != nil {
		t.Fatalf("read the module's files: %v", err)
	}
	return files
}

func TestLayoutFollowsTheRules(t *testing.T) {
	t.Parallel()
	files := readModule(t)
	if len(files) == 0 {
		t.Fatal("no Go files found: the test does not run in the module's root")
	}
	for _, v := range violations(files) {
		t.Error(v)
	}
}

// A check that has never failed is not yet a check.
func TestImportRuleRefusesOffendingImports(t *testing.T) {
	t.Parallel()
	const server = serverPath + "v2/server"
	local := func(dir string) string { return path.Join(modulePath, dir) }
	tests := []struct {
		name     string
		dir      string
		test     bool
		imp      string
		wantRule string // part of it, "" for allowed
	}{
		{name: "root uses the standard library", dir: "", imp: "encoding/json"},
		{name: "root uses a pure helper", dir: "", imp: "github.com/google/uuid"},
		{name: "root uses the NATS client", dir: "", imp: "github.com/nats-io/nats.go", wantRule: "the root package imports only"},
		{name: "root uses a library", dir: "", imp: local("relay"), wantRule: "the root package imports nothing"},
		{name: "root uses internal", dir: "", imp: local("internal/x"), wantRule: "the root package imports nothing"},
		{name: "library uses root", dir: "relay", imp: local("")},
		{name: "library uses internal", dir: "relay", imp: local("internal/backfill")},
		{name: "library uses the NATS client", dir: "relay", imp: "github.com/nats-io/nats.go"},
		{name: "library uses a sibling", dir: "relay", imp: local("outbox"), wantRule: "libraries do not import each other"},
		{name: "library uses a sibling's backend", dir: "relay", imp: local("outbox/sqlite"), wantRule: "libraries do not import each other"},
		{name: "new library uses a sibling", dir: "brandnew", imp: local("dlq"), wantRule: "libraries do not import each other"},
		{name: "library uses its own backend", dir: "outbox", imp: local("outbox/sqlite"), wantRule: "its own backends"},
		{name: "backend uses its parent", dir: "outbox/sqlite", imp: local("outbox")},
		{name: "backend uses root", dir: "outbox/sqlite", imp: local("")},
		{name: "suite uses its parent", dir: "outbox/outboxtest", imp: local("outbox")},
		{name: "backend uses the suite", dir: "outbox/sqlite", imp: local("outbox/outboxtest"), wantRule: "only the root and its own parent"},
		{name: "backend uses another library", dir: "outbox/sqlite", imp: local("relay"), wantRule: "libraries do not import each other"},
		{name: "ledger uses the outbox's backend", dir: "dedup/sqlite", imp: local("outbox/sqlite"), wantRule: "libraries do not import each other"},
		{name: "internal uses a library", dir: "internal/x", imp: local("dlq"), wantRule: "nothing above them"},
		{name: "internal uses root", dir: "internal/x", imp: local("")},
		{name: "command wires libraries", dir: "cmd/relay", imp: local("outbox/sqlite")},
		{name: "example wires libraries", dir: "examples/orders", imp: local("consumer")},
		{name: "library uses a command", dir: "relay", imp: local("cmd/relay"), wantRule: "nothing imports cmd"},
		{name: "command uses an example", dir: "cmd/relay", imp: local("examples/orders"), wantRule: "nothing imports cmd"},
		{name: "command uses its own folder", dir: "cmd/relay", imp: local("cmd/relay/internal/demo")},
		{name: "command uses another command", dir: "cmd/other", imp: local("cmd/relay/internal/demo"), wantRule: "nothing imports cmd"},
		{name: "library test wires a sibling", dir: "relay", test: true, imp: local("outbox/sqlite")},
		{name: "embedded uses the server", dir: "embedded", imp: server},
		{name: "test uses the server", dir: "relay", test: true, imp: server},
		{name: "library uses the server", dir: "relay", imp: server, wantRule: "nats-server is imported only"},
		{name: "command uses the server", dir: "cmd/relay", imp: server, wantRule: "nats-server is imported only"},
		{name: "root uses the server", dir: "", imp: server, wantRule: "nats-server is imported only"},
		{name: "another module with our prefix", dir: "relay", imp: modulePath + "x/outbox"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got := importRule(tt.dir, tt.test, tt.imp)
			if (got == "") != (tt.wantRule == "") || !strings.Contains(got, tt.wantRule) {
				t.Errorf("importRule(%q, %v, %q) = %q, want %q", tt.dir, tt.test, tt.imp, got, tt.wantRule)
			}
		})
	}
}

// Every violation names the file to open.
func TestViolationsNameTheOffendingFile(t *testing.T) {
	t.Parallel()
	const doc = "// Package p one.\n//\n// two\n"
	tests := []struct {
		name  string
		files map[string]string
		want  []string // parts, one per violation in order
	}{
		{"clean", map[string]string{"p/p.go": doc + "package p\n", "p/q.go": "package p\n"}, nil},
		{"import", map[string]string{"dlq/p.go": doc + "package dlq\nimport _ \"" + modulePath + "/relay\"\n"}, []string{"dlq/p.go: imports "}},
		{"no comment", map[string]string{"p/p.go": "package p\n"}, []string{"./p: 0 files"}},
		{"two comments", map[string]string{"p/p.go": doc + "package p\n", "p/q.go": doc + "package p\n"}, []string{"p/p.go, p/q.go: 2 files"}},
		{"short comment", map[string]string{"p/p.go": "// Package p.\npackage p\n"}, []string{"p/p.go: 1 lines"}},
		{"build constraint is no comment", map[string]string{"p/p.go": doc + "package p\n", "p/q.go": "//go:build unix\n\npackage p\n"}, nil},
		{"test files need no comment", map[string]string{"p/p_test.go": "package p_test\n"}, nil},
		{"banned name", map[string]string{"internal/util/u.go": doc + "package util\n"}, []string{"internal/util/u.go: package util"}},
		{"banned folder", map[string]string{"internal/types/u.go": doc + "package shapes\n"}, []string{"internal/types/u.go: package shapes"}},
		{"long", map[string]string{"p/p.go": doc + "package p\n" + strings.Repeat("\n", maxFileLines)}, []string{"p/p.go: 604 lines"}},
		{"long but generated", map[string]string{"p/p.go": "// Code generated by x. DO NOT EDIT.\n\n" + doc + "package p\n" + strings.Repeat("\n", maxFileLines)}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var files []sourceFile
			for name, src := range tt.files {
				f, err := parseSource(name, []byte(src))
				if err != nil {
					t.Fatal(err)
				}
				files = append(files, f)
			}
			slices.SortFunc(files, func(a, b sourceFile) int { return strings.Compare(a.name, b.name) })
			got := violations(files)
			if len(got) != len(tt.want) {
				t.Fatalf("violations = %q, want %d like %q", got, len(tt.want), tt.want)
			}
			for i, want := range tt.want {
				if !strings.HasPrefix(got[i], want) {
					t.Errorf("violation %d = %q, want prefix %q", i, got[i], want)
				}
			}
		})
	}
}
