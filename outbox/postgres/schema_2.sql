-- What is known of each stream. A stream that has not got the last message that it
-- acknowledged, by what it was when a relay last looked or by what a relay has
-- recorded since, has lost it.
CREATE TABLE {stream} (
	stream TEXT PRIMARY KEY,
	created TEXT NOT NULL, -- to the nanosecond
	seq BIGINT NOT NULL DEFAULT 0,
	msg_id TEXT NOT NULL DEFAULT '',
	pos BIGINT NOT NULL DEFAULT 0,
	at TIMESTAMPTZ,
	since TIMESTAMPTZ, -- rows recorded by then were published to older streams of the name
	older BOOLEAN NOT NULL DEFAULT false, -- such rows may be retained
	recall JSONB -- of rows that are to be published again
) WITH (fillfactor = 20);

-- The last message that each relay has recorded: a row for each, so that none waits
-- for another.
CREATE TABLE {anchor} (
	stream TEXT,
	owner TEXT,
	created TEXT NOT NULL,
	seq BIGINT NOT NULL,
	msg_id TEXT NOT NULL,
	pos BIGINT NOT NULL,
	at TIMESTAMPTZ NOT NULL,
	PRIMARY KEY (stream, owner)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 100);
