package postgres

import (
	"errors"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATE codes, PostgreSQL appendix A.
const (
	codeUniqueViolation = "23505"
	codeReadOnly        = "25006"
	codeInvalidSchema   = "3F000"
	codeUndefinedTable  = "42P01"
)

func hasCode(err error, codes ...string) (has bool) {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && slices.Contains(codes, pg.Code)
}

// isReadOnly reports that the server takes no writes: it is, or has become, a
// standby, or was set so.
func isReadOnly(err error) (readOnly bool) { return hasCode(err, codeReadOnly) }
