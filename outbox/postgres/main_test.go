package postgres_test

import (
	"os"
	"testing"

	"github.com/seed-5e04d8fb/jetbox/internal/pgtest"
)

func TestMain(m *testing.M) { os.Exit(pgtest.Main(m)) }
