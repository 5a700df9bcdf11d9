package postgres

import (
	"fmt"
	"regexp"
	"strings"
)

// DefaultTable is the outbox's name unless configured.
const DefaultTable = "outbox"

// maxTable leaves room for the longest suffix within PostgreSQL's 63 bytes.
const maxTable = 63 - len("_dead_letter")

var identifier = regexp.MustCompile(`^[a-z_][a-z0-9_]*$`)

// splitTable checks the outbox's name, which may have a schema in front.
func splitTable(name string) (schema, table string, err error) {
	schema, table, qualified := strings.Cut(name, ".")
	if !qualified {
		schema, table = "", name
	}
	switch {
	case !identifier.MatchString(table), qualified && !identifier.MatchString(schema):
		return "", "", fmt.Errorf("table name %q: want TABLE or SCHEMA.TABLE, of lower-case letters, digits and _, not starting with a digit", name)
	case len(table) > maxTable, len(schema) > 63:
		return "", "", fmt.Errorf("table name %q: longer than %d bytes", name, maxTable)
	}
	return schema, table, nil
}

// names fills an outbox's names into SQL.
type names struct{ *strings.Replacer }

// The ordering key of a row, as a number: rows of one key are found by it and
// then compared in full. hashtextextended is the same on every server of one
// byte order.
const keyHash = `hashtextextended(%[1]s.aggregate_id, hashtextextended(coalesce(%[1]s.aggregate_type, ''), 0))`

// newNames expects names that splitTable has checked. They need no quotes but
// where they are key words.
func newNames(schema, table string) names {
	in := func(name string) string { return `"` + schema + `"."` + name + `"` }
	pairs := []string{"{schema}", `"` + schema + `"`, "{name}", table, "{outbox}", in(table)}
	for token, suffix := range map[string]string{
		"queue": "queue", "wait": "wait", "relay": "relay", "shard": "shard", "claim": "claim", "dead": "dead_letter",
		"stream": "stream", "anchor": "anchor", "archive": "archive", "status": "status", "version": "schema",
		"fn_shard": "shard_of", "fn_defaults": "defaults", "fn_enqueue": "enqueue", "fn_requeue": "requeue",
	} {
		pairs = append(pairs, "{"+token+"}", in(table+"_"+suffix))
	}
	for _, alias := range []string{"n", "o", "r", "s"} {
		pairs = append(pairs, "{hash "+alias+"}",
			fmt.Sprintf("CASE WHEN %s.aggregate_id <> '' THEN "+keyHash+" END", alias))
	}
	for _, pair := range [][2]string{{"w", "o"}, {"w", "s"}, {"p", "w"}, {"p", "o"}} {
		pairs = append(pairs, "{"+pair[0]+" has the key of "+pair[1]+"}", sameKey(pair[0], pair[1]))
	}
	return names{strings.NewReplacer(pairs...)}
}

// sameKey compares the ordering key of a waiting row with that of another row,
// by its hash, which is indexed, and then in full.
func sameKey(waiting, other string) string {
	hash := fmt.Sprintf(keyHash, other)
	return fmt.Sprintf(`%[1]s.key_hash = %[3]s AND %[1]s.aggregate_id = %[2]s.aggregate_id
		AND coalesce(%[1]s.aggregate_type, '') = coalesce(%[2]s.aggregate_type, '')`, waiting, other, hash)
}

func (n names) sql(query string) string { return n.Replace(query) }
